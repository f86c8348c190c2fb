// Stand-in, see cublas_v2.h.
#pragma once

typedef struct trainctl_opaque_cublas_lt* cublasLtHandle_t;
