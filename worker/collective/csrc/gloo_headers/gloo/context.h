// Stand-in, see algorithm.h. Both members are exported by libtorch_cpu and are not virtual.
#pragma once

#include <chrono>

namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
  // Closes the connection to every peer; the peers see the end of the stream.
  void closeConnections();
};
}  // namespace gloo
