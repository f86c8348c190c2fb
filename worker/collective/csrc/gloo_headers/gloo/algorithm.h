// Stand-ins for the five Gloo headers that ProcessGroupGloo.hpp includes and the torch wheel leaves out.
//
// This side only ever holds shared pointers to these types and calls the two exported members of Context that are declared
// in context.h, so names are enough: no layout and no virtual table of ours is ever used.
#pragma once

namespace gloo {
class Algorithm;
}
