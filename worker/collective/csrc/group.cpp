// Process groups and the work that they start.
//
// A group's state (mutex, condition, aborted flag) outlives the group for as long as one of its works lives, so that a work may
// be dropped or waited for in any order.
#include "error.h"
#include "store.h"

#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace {

// Gives abort() the connections, which c10d keeps protected: ProcessGroupGloo has no abort of its own.
class Gloo final : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;
  void close_connections() {
    for (const auto& context : contexts_) {
      context->closeConnections();
    }
  }
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  bool aborted = false;
  std::string reason;
  int64_t under_way = 0;
};

}  // namespace

extern "C" {

struct tc_group {
  c10::intrusive_ptr<c10d::Backend> backend;
  c10::intrusive_ptr<Gloo> gloo;  // null for a backend of another kind
  std::shared_ptr<State> state;
};

struct tc_work {
  c10::intrusive_ptr<c10d::Work> work;
  std::shared_ptr<State> state;
  std::shared_ptr<bool> done;  // guarded by state->mutex; null when the host does not follow the work (NCCL)

};

void tc_string_free(char* text) { free(text); }

int32_t tc_group_gloo(
    tc_kv callbacks, int32_t rank, int32_t size, const char* address, int64_t timeout_ms, tc_group** out, char** message) {
  return guard(message, [&] {
    const std::chrono::milliseconds timeout(timeout_ms);
    // Owned before anything can throw, so that the Rust side is dropped exactly once.
    auto key_value = std::make_shared<trainctl::KeyValue>(callbacks);
    auto store = c10::make_intrusive<trainctl::CallbackStore>(std::move(key_value), timeout);
    auto options = c10d::ProcessGroupGloo::Options::create(timeout);
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
    auto gloo = c10::make_intrusive<Gloo>(store, rank, size, options);
    *out = new tc_group{gloo, gloo, std::make_shared<State>()};
    return TC_OK;
  });
}

// For the NCCL plug-in: wraps a backend that another shared object made.
tc_group* tc_group_of_backend(c10d::Backend* backend) {
  return new tc_group{c10::intrusive_ptr<c10d::Backend>::reclaim(backend), {}, std::make_shared<State>()};
}

// The plug-in's store lives here, so that both backends share one implementation.
c10d::Store* tc_store_new(tc_kv callbacks, int64_t timeout_ms) {
  auto key_value = std::make_shared<trainctl::KeyValue>(callbacks);
  return c10::make_intrusive<trainctl::CallbackStore>(std::move(key_value), std::chrono::milliseconds(timeout_ms)).release();
}

// Ends every wait on the group's works at once with `reason`, and closes the connections so that peers notice.
int32_t tc_group_abort(tc_group* group, const char* reason, char** message) {
  return guard(message, [&] {
    {
      const std::lock_guard<std::mutex> lock(group->state->mutex);
      if (group->state->aborted) {
        return TC_OK;
      }
      group->state->aborted = true;
      group->state->reason = reason;
    }
    group->state->changed.notify_all();
    if (group->gloo) {
      group->gloo->close_connections();
    } else {
      group->backend->abort();
    }
    return TC_OK;
  });
}

// Destroying a Gloo group waits for its queue, up to the operation timeout. A group that still has work under way is
// therefore left to the end of the process: its threads hold their own references.
void tc_group_free(tc_group* group) {
  bool leak = false;
  if (group->gloo) {
    const std::lock_guard<std::mutex> lock(group->state->mutex);
    leak = group->state->under_way > 0;
  }
  if (leak) {
    (void)group->backend.release();
    (void)group->gloo.release();
  }
  char* ignored = nullptr;
  guard(&ignored, [&] {
    delete group;
    return TC_OK;
  });
  free(ignored);
}

}  // extern "C"

namespace {

// A work, and what is still to do on Gloo's thread when it has ended well.
struct Started {
  c10::intrusive_ptr<c10d::Work> work;
  std::function<void()> then;

  Started(c10::intrusive_ptr<c10d::Work> work, std::function<void()> then = {})
      : work(std::move(work)), then(std::move(then)) {}
};

// Starts one operation: refuses on an aborted group, then follows the work's end.
template <class Start>
int32_t start_work(tc_group* group, tc_work** out, char** message, const Start& start) {
  return guard(message, [&] {
    auto& state = group->state;
    {
      const std::lock_guard<std::mutex> lock(state->mutex);
      if (state->aborted) {
        *message = strdup(state->reason.c_str());
        return TC_ABORTED;
      }
    }
    Started started = start(*group->backend);
    auto& work = started.work;
    std::shared_ptr<bool> done;
    if (group->gloo) {
      done = std::make_shared<bool>(false);
      {
        const std::lock_guard<std::mutex> lock(state->mutex);
        ++state->under_way;
      }
      // Runs on Gloo's thread when the work ends, or here and now when it has ended already.
      work->getFuture()->addCallback([state, done, then = std::move(started.then)](c10::ivalue::Future& future) {
        if (then && !future.hasError()) {
          then();
        }
        {
          const std::lock_guard<std::mutex> lock(state->mutex);
          *done = true;
          --state->under_way;
        }
        state->changed.notify_all();
      });
    }
    *out = new tc_work{std::move(work), state, std::move(done)};
    return TC_OK;
  });
}

c10d::ReduceOp reduce_op(int32_t op) {
  switch (op) {
    case 0: return c10d::ReduceOp::SUM;
    case 1: return c10d::ReduceOp::MAX;
    case 2: return c10d::ReduceOp::MIN;
    default: TORCH_CHECK_VALUE(false, "unknown reduction ", op);
  }
}

}  // namespace

extern "C" {

int32_t tc_all_reduce(tc_group* group, const at::Tensor* tensor, int32_t op, tc_work** out, char** message) {
  return start_work(group, out, message, [&](c10d::Backend& backend) {
    c10d::AllreduceOptions options;
    options.reduceOp = reduce_op(op);
    std::vector<at::Tensor> tensors{*tensor};
    return backend.allreduce(tensors, options);
  });
}

int32_t tc_broadcast(tc_group* group, const at::Tensor* tensor, int32_t root, tc_work** out, char** message) {
  return start_work(group, out, message, [&](c10d::Backend& backend) {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.rootTensor = 0;
    std::vector<at::Tensor> tensors{*tensor};
    return backend.broadcast(tensors, options);
  });
}

int32_t tc_all_gather(
    tc_group* group, const at::Tensor* output, const at::Tensor* input, tc_work** out, char** message) {
  return start_work(group, out, message, [&](c10d::Backend& backend) {
    // Flat views: c10d wants one shape per rank, we promise element counts only.
    at::Tensor gathered = output->view({-1});
    at::Tensor own = input->view({-1});
    return backend._allgather_base(gathered, own);
  });
}

// libtorch's Gloo has no true reduce-scatter: its own reduces everywhere and copies, but only in wait(), with no future to
// follow. Here the copy is part of the work.
int32_t tc_reduce_scatter(
    tc_group* group, const at::Tensor* output, const at::Tensor* input, int32_t op, tc_work** out, char** message) {
  if (!group->gloo) {
    return start_work(group, out, message, [&](c10d::Backend& backend) {
      c10d::ReduceScatterOptions options;
      options.reduceOp = reduce_op(op);
      at::Tensor own = output->view({-1});
      at::Tensor whole = input->view({-1});
      return backend._reduce_scatter_base(own, whole, options);
    });
  }
  return start_work(group, out, message, [&](c10d::Backend& backend) -> Started {
    const at::NoGradGuard no_grad;
    c10d::AllreduceOptions options;
    options.reduceOp = reduce_op(op);
    at::Tensor whole = input->view({-1}).clone();
    at::Tensor own = *output;
    const auto offset = static_cast<size_t>(backend.getRank()) * own.nbytes();
    std::vector<at::Tensor> tensors{whole};
    auto work = backend.allreduce(tensors, options);
    return {std::move(work), [whole, own, offset] {
              if (own.nbytes() > 0) {
                memcpy(own.data_ptr(), static_cast<const char*>(whole.data_ptr()) + offset, own.nbytes());
              }
            }};
  });
}

int32_t tc_barrier(tc_group* group, tc_work** out, char** message) {
  return start_work(group, out, message, [&](c10d::Backend& backend) { return backend.barrier(); });
}

// Returns when the work has ended, well or not, or when the group is aborted. The operation's own timeout bounds it.
int32_t tc_work_wait(tc_work* work, char** message) {
  return guard(message, [&] {
    if (!work->done) {
      work->work->wait();
      return TC_OK;
    }
    {
      std::unique_lock<std::mutex> lock(work->state->mutex);
      work->state->changed.wait(lock, [&] { return *work->done || work->state->aborted; });
      if (!*work->done) {
        *message = strdup(work->state->reason.c_str());
        return TC_ABORTED;
      }
    }
    const auto future = work->work->getFuture();
    if (future->hasError()) {
      std::rethrow_exception(future->exception_ptr());
    }
    return TC_OK;
  });
}

int32_t tc_work_done(tc_work* work) {
  if (!work->done) {
    return work->work->isCompleted() ? 1 : 0;
  }
  const std::lock_guard<std::mutex> lock(work->state->mutex);
  return *work->done ? 1 : 0;
}

void tc_work_free(tc_work* work) { delete work; }

// What c10d has noted of the last collectives of this process's groups on CPUs, as JSON; freed with tc_string_free.
int32_t tc_flight_record(char** record, char** message) {
  return guard(message, [&] {
    *record = strdup(c10d::dump_fr_trace_json(/*includeCollectives=*/true, /*onlyActive=*/false).c_str());
    return TC_OK;
  });
}

}  // extern "C"
