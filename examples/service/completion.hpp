// What a client asks for: the body of POST /v1/completions.
#pragma once

#include <cstdint>
#include <export_grok.hpp>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace service {

// A request as it was checked.
struct Completion {
  std::variant<std::string, std::vector<std::int32_t>> prompt;
  export_grok::Params params;
  bool stream = false;
  bool include_usage = false;  // a stream ends with its usage
};

// Read a body. Defaults are OpenAI's: 16 tokens, temperature 1, another seed each time. A field
// that is not known is refused as OpenAI does, and so is one that would have no effect: a word
// that is misspelt, or a penalty that is not there, is better told than passed over.
//
// Throws Failure: 400 for what cannot be, 404 for another model's name.
Completion completion_of(std::string_view body, const std::string& model);

}  // namespace service
