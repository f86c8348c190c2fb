// The few libtorch calls that tch does not expose.
#include "error.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

namespace {

// A list of tensors from Rust: pointers to tch's handles, null for "none".
std::vector<at::Tensor> list(const at::Tensor* const* tensors, size_t count) {
  std::vector<at::Tensor> result;
  result.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    result.push_back(tensors[i] == nullptr ? at::Tensor() : *tensors[i]);
  }
  return result;
}

}  // namespace

extern "C" {

// `gradients` has room for num_inputs handles; an input that no output depends on gets null.
int32_t tc_grad(
    const at::Tensor* const* outputs, const at::Tensor* const* grad_outputs, size_t num_outputs,
    const at::Tensor* const* inputs, size_t num_inputs, int32_t retain_graph, at::Tensor** gradients, char** message) {
  return guard(message, [&] {
    const auto found = torch::autograd::grad(
        list(outputs, num_outputs), list(inputs, num_inputs), list(grad_outputs, num_outputs), retain_graph != 0,
        /*create_graph=*/false, /*allow_unused=*/true);
    for (size_t i = 0; i < num_inputs; ++i) {
      gradients[i] = found[i].defined() ? new at::Tensor(found[i]) : nullptr;
    }
    return TC_OK;
  });
}

int32_t tc_fused_adamw(
    const at::Tensor* const* params, const at::Tensor* const* grads, const at::Tensor* const* exp_avgs,
    const at::Tensor* const* exp_avg_sqs, const at::Tensor* const* steps, size_t count, double lr, double beta1,
    double beta2, double weight_decay, double eps, char** message) {
  return guard(message, [&] {
    const at::NoGradGuard no_grad;
    auto p = list(params, count);
    auto g = list(grads, count);
    auto m = list(exp_avgs, count);
    auto v = list(exp_avg_sqs, count);
    at::_fused_adamw_(
        p, g, m, v, {}, list(steps, count), lr, beta1, beta2, weight_decay, eps, /*amsgrad=*/false, /*maximize=*/false);
    return TC_OK;
  });
}

int32_t tc_set_deterministic(int32_t on, char** message) {
  return guard(message, [&] {
    auto& context = at::globalContext();
    context.setDeterministicAlgorithms(on != 0, /*warn_only=*/false);
    // Filling fresh memory would only hide a read of uninitialised memory, at the price of a pass over each buffer.
    context.setDeterministicFillUninitializedMemory(false);
    context.setDeterministicCuDNN(on != 0);
    context.setBenchmarkCuDNN(false);
    return TC_OK;
  });
}

int32_t tc_set_flush_denormal(int32_t on) { return at::globalContext().setFlushDenormal(on != 0) ? 1 : 0; }

int32_t tc_set_num_threads(int32_t threads, char** message) {
  return guard(message, [&] {
    at::set_num_threads(threads);
    return TC_OK;
  });
}

int64_t tc_num_bytes(const at::Tensor* tensor) { return static_cast<int64_t>(tensor->nbytes()); }

// The address of the first byte of a dense, contiguous CPU tensor; null for any other.
void* tc_host_bytes(const at::Tensor* tensor) {
  if (!tensor->defined() || !tensor->device().is_cpu() || tensor->layout() != at::kStrided || !tensor->is_contiguous()) {
    return nullptr;
  }
  return tensor->data_ptr();
}

}  // extern "C"
