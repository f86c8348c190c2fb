// NVML as the suite needs it: one GPU that is well and one that is not. Only the calls that the worker makes; the layouts are
// those of nvml.h.
#include <stdint.h>
#include <string.h>

typedef struct { int number; } Gpu;
static Gpu gpus[2] = {{0}, {1}};
static const char *uuids[2] = {"GPU-aaaa", "GPU-bbbb"};

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **gpu) {
    if (index > 1) return 2;
    *gpu = &gpus[index];
    return 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **gpu) {
    for (int i = 0; i < 2; i++)
        if (!strcmp(uuid, uuids[i])) { *gpu = &gpus[i]; return 0; }
    return 6;
}

int nvmlDeviceGetUUID(Gpu *gpu, char *text, unsigned length) { strncpy(text, uuids[gpu->number], length); return 0; }
int nvmlDeviceGetName(Gpu *gpu, char *text, unsigned length) { (void)gpu; strncpy(text, "Test GPU", length); return 0; }

typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;
int nvmlDeviceGetMemoryInfo_v2(Gpu *gpu, Memory *memory) {
    (void)gpu;
    memory->total = 80ull << 30;
    memory->free = 79ull << 30;
    return 0;
}

int nvmlDeviceGetTotalEccErrors(Gpu *gpu, int type, int counter, unsigned long long *errors) {
    if (type != 1 || counter != 0) return 2; // uncorrected, volatile
    *errors = gpu->number ? 3 : 0;
    return 0;
}

typedef struct { unsigned id, scope; long long timestamp, latency; int type, result; unsigned long long value; } Field;
int nvmlDeviceGetFieldValues(Gpu *gpu, int count, Field *fields) {
    for (int i = 0; i < count; i++) {
        fields[i].type = 1; // unsigned int
        fields[i].result = 0;
        fields[i].value = gpu->number && fields[i].id == 144; // a row waits to be remapped
    }
    return 0;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu *gpu, unsigned long long *reasons) {
    *reasons = gpu->number ? 0x41 : 0x1; // thermal slowdown by hardware; idle
    return 0;
}

int nvmlDeviceGetCurrPcieLinkWidth(Gpu *gpu, unsigned *width) { *width = gpu->number ? 8 : 16; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(Gpu *gpu, unsigned *width) { (void)gpu; *width = 16; return 0; }

typedef struct { unsigned pid; unsigned long long memory; unsigned instance, compute_instance; } Process;
int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, unsigned *count, Process *processes) {
    if (!gpu->number) { *count = 0; return 0; }
    if (*count == 0) { *count = 1; return 7; } // insufficient size
    processes[0].pid = 4242;
    *count = 1;
    return 0;
}
