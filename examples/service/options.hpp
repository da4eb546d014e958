// The command line.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <export_grok.hpp>
#include <string>

namespace service {

struct Options {
  std::string bundle;
  std::string host = "127.0.0.1";
  int port = 8000;                          // 0: any that is free
  export_grok::Options model;               // what is left to it, --batch and so on
  std::chrono::milliseconds grace{10'000};  // for what runs when the service is told to end
  std::size_t max_body = 1'000'000;         // bytes

  // The name that clients know the model by: of the bundle's folder.
  std::string model_name() const;
};

// Read the command line. --help writes what there is and ends the process with 0; what is wrong
// is written to stderr and ends it with 2.
Options options_of(int count, char** arguments);

}  // namespace service
