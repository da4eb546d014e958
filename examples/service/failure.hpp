// What a client is told when it gets no answer.
#pragma once

#include <export_grok.hpp>
#include <string>

namespace service {

// A status of HTTP and what OpenAI's error objects have: it is thrown, and becomes a reply.
struct Failure {
  int status = 500;
  std::string message;
  std::string type = "server_error";
  std::string param = {};  // the field that is wrong, if one is
  std::string code = {};
};

// A request that cannot be, by the field that is wrong.
Failure invalid(const std::string& param, const std::string& message);

// An error of the library: 400 for what the client can put right, 429 for what it may repeat, 503
// while there is no model, else 500.
Failure failure_of(const export_grok::Error& error);

}  // namespace service
