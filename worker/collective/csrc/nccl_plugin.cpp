// The NCCL backend, as a shared object of its own (nccl/build.sh): the trainer opens it only when the spec asks for CUDA, so
// that one binary serves both kinds of machine. Everything after the constructor goes through c10d::Backend in group.cpp.
#include "error.h"

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

extern "C" {

// Takes over `store` in every case. On success `*out` is a backend whose one reference passes to the caller.
__attribute__((visibility("default"))) int32_t tc_nccl_backend(
    c10d::Store* store, int32_t rank, int32_t size, int32_t device_index, int64_t timeout_ms, c10d::Backend** out,
    char** message) {
  return guard(message, [&] {
    auto owned = c10::intrusive_ptr<c10d::Store>::reclaim(store);
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = std::chrono::milliseconds(timeout_ms);
    auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(owned, rank, size, options);
    // Communicators are made while the group forms and not at the first collective: afterwards the store is sealed.
    const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(device_index));
    backend->setBoundDeviceId(device);
    backend->eagerConnectSingleDevice(device);
    *out = backend.release();
    return TC_OK;
  });
}

// As tc_flight_record, of NCCL's groups.
__attribute__((visibility("default"))) int32_t tc_nccl_flight_record(char** record, char** message) {
  return guard(message, [&] {
    *record = strdup(c10d::dump_nccl_trace_json(/*includeCollectives=*/true, /*onlyActive=*/false).c_str());
    return TC_OK;
  });
}

}  // extern "C"
