// Marks a function that kernels call too; nothing to a compiler that knows no CUDA.
#pragma once

#ifdef __CUDACC__
#define CPR_EXT_HOST_DEVICE __host__ __device__
#else
#define CPR_EXT_HOST_DEVICE
#endif
