// Stand-in, see algorithm.h. Nothing of it is used by ProcessGroupGloo.hpp itself.
#pragma once
