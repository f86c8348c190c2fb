// Stand-in, see cublas_v2.h.
#pragma once

typedef struct trainctl_opaque_cusparse* cusparseHandle_t;
typedef int cusparseStatus_t;
