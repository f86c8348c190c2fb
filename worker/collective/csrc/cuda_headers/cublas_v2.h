// Stand-ins for the headers of cuBLAS, cuSPARSE and cuSOLVER, whose wheels are 0.9 GB: ATen's CUDA headers declare functions
// that hand these types around, and the NCCL plug-in calls none of them. Opaque names are enough.
#pragma once

typedef struct trainctl_opaque_cublas* cublasHandle_t;
typedef int cublasStatus_t;
