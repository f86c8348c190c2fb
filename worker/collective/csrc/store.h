// A c10d::Store whose every call is answered by Rust (trait KeyValue, src/store.rs).
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>

extern "C" {

struct tc_slice {
  const uint8_t* data;
  size_t len;
};

enum tc_kv_op : int32_t {
  TC_KV_SET = 0,
  TC_KV_GET = 1,
  TC_KV_ADD = 2,
  TC_KV_CHECK = 3,
  TC_KV_WAIT = 4,
  TC_KV_DELETE = 5,
  TC_KV_COMPARE_SET = 6,
  TC_KV_NUM_KEYS = 7,
};

// What is asked. Slices are lent for the length of the call.
struct tc_kv_request {
  int32_t op;
  const tc_slice* keys;
  size_t num_keys;
  tc_slice value;     // set: the value; compare_set: the expected value
  tc_slice desired;   // compare_set only
  int64_t number;     // add only
  int64_t timeout_ms; // get and wait
};

// The answer. `data` belongs to Rust until `release` is called; with a code other than 0 it holds the error text.
struct tc_kv_reply {
  uint8_t* data;
  size_t len;
  size_t capacity;
  int64_t number;
};

struct tc_kv {
  void* context;
  int32_t (*call)(void* context, const tc_kv_request* request, tc_kv_reply* reply);
  void (*release)(tc_kv_reply* reply);
  void (*drop)(void* context);
};

}  // extern "C"

namespace trainctl {

// Owns the Rust side of a store; shared by a store and its clones.
class KeyValue {
 public:
  explicit KeyValue(const tc_kv& callbacks) : callbacks_(callbacks) {}
  ~KeyValue() { callbacks_.drop(callbacks_.context); }
  KeyValue(const KeyValue&) = delete;
  KeyValue& operator=(const KeyValue&) = delete;

  // Throws c10::DistStoreError with Rust's text when Rust answers with an error.
  std::pair<std::vector<uint8_t>, int64_t> call(tc_kv_request request, const std::vector<std::string>& keys) const;

 private:
  tc_kv callbacks_;
};

class CallbackStore final : public c10d::Store {
 public:
  CallbackStore(std::shared_ptr<const KeyValue> key_value, std::chrono::milliseconds timeout)
      : c10d::Store(timeout), key_value_(std::move(key_value)) {}

  c10::intrusive_ptr<c10d::Store> clone() override;

  using c10d::Store::compareSet;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(
      const std::string& key, const std::vector<uint8_t>& expected, const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

 private:
  std::shared_ptr<const KeyValue> key_value_;
};

}  // namespace trainctl
