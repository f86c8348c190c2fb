// How failures cross the C boundary: a code, and a message that the caller frees with tc_string_free.
//
// No exception ever leaves an extern "C" function: each body runs inside guard(), which turns what it catches into a code.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstring>
#include <exception>

enum tc_code : int32_t {
  TC_OK = 0,
  TC_TORCH = 1,    // libtorch, c10d or Gloo threw; src/error.rs reads the text
  TC_ABORTED = 2,  // the group was aborted while the work was under way
};

// Each thrower's own text without the C++ backtrace that c10::Error::what() carries.
inline char* tc_message(const std::exception& error) {
  if (const auto* torch = dynamic_cast<const c10::Error*>(&error)) {
    return strdup(torch->what_without_backtrace());
  }
  return strdup(error.what());
}

template <class Body>
int32_t guard(char** message, const Body& body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    *message = tc_message(error);
  } catch (...) {
    *message = strdup("an exception that is no std::exception");
  }
  return TC_TORCH;
}
