// Stand-in, see cublas_v2.h.
#pragma once

typedef int cusolverStatus_t;
