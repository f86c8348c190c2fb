// Stand-in, see cublas_v2.h.
#pragma once

#include <cusolver_common.h>

typedef struct trainctl_opaque_cusolver* cusolverDnHandle_t;
