#include "store.h"

#include <c10/util/Exception.h>

namespace trainctl {
namespace {

tc_slice slice(const std::vector<uint8_t>& bytes) { return {bytes.data(), bytes.size()}; }

}  // namespace

std::pair<std::vector<uint8_t>, int64_t> KeyValue::call(
    tc_kv_request request, const std::vector<std::string>& keys) const {
  std::vector<tc_slice> slices;
  slices.reserve(keys.size());
  for (const auto& key : keys) {
    slices.push_back({reinterpret_cast<const uint8_t*>(key.data()), key.size()});
  }
  request.keys = slices.data();
  request.num_keys = slices.size();

  tc_kv_reply reply{};
  const int32_t code = callbacks_.call(callbacks_.context, &request, &reply);
  std::vector<uint8_t> bytes(reply.data, reply.data + reply.len);
  callbacks_.release(&reply);
  if (code != 0) {
    C10_THROW_ERROR(DistStoreError, std::string(bytes.begin(), bytes.end()));
  }
  return {std::move(bytes), reply.number};
}

c10::intrusive_ptr<c10d::Store> CallbackStore::clone() {
  return c10::make_intrusive<CallbackStore>(key_value_, timeout_);
}

void CallbackStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  tc_kv_request request{};
  request.op = TC_KV_SET;
  request.value = slice(value);
  key_value_->call(request, {key});
}

std::vector<uint8_t> CallbackStore::compareSet(
    const std::string& key, const std::vector<uint8_t>& expected, const std::vector<uint8_t>& desired) {
  tc_kv_request request{};
  request.op = TC_KV_COMPARE_SET;
  request.value = slice(expected);
  request.desired = slice(desired);
  return key_value_->call(request, {key}).first;
}

std::vector<uint8_t> CallbackStore::get(const std::string& key) {
  tc_kv_request request{};
  request.op = TC_KV_GET;
  request.timeout_ms = timeout_.count();
  return key_value_->call(request, {key}).first;
}

int64_t CallbackStore::add(const std::string& key, int64_t value) {
  tc_kv_request request{};
  request.op = TC_KV_ADD;
  request.number = value;
  return key_value_->call(request, {key}).second;
}

bool CallbackStore::deleteKey(const std::string& key) {
  tc_kv_request request{};
  request.op = TC_KV_DELETE;
  return key_value_->call(request, {key}).second != 0;
}

bool CallbackStore::check(const std::vector<std::string>& keys) {
  tc_kv_request request{};
  request.op = TC_KV_CHECK;
  return key_value_->call(request, keys).second != 0;
}

int64_t CallbackStore::getNumKeys() {
  tc_kv_request request{};
  request.op = TC_KV_NUM_KEYS;
  return key_value_->call(request, {}).second;
}

void CallbackStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void CallbackStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  tc_kv_request request{};
  request.op = TC_KV_WAIT;
  request.timeout_ms = timeout.count();
  key_value_->call(request, keys);
}

}  // namespace trainctl
