#include "completion.hpp"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <set>

#include "failure.hpp"

namespace service {
namespace {

using nlohmann::json;

constexpr auto kMostTokens = std::numeric_limits<std::int32_t>::max();

// The fields of an object, each read once; null is as if it were not there.
class Fields {
 public:
  Fields(const json& object, std::string path) : object_(object), path_(std::move(path)) {}

  const json* find(const char* name) {
    read_.insert(name);
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  bool boolean(const char* name) {
    const json* value = find(name);
    if (value == nullptr) return false;
    if (!value->is_boolean()) throw wrong(name, *value, "true or false");
    return value->get<bool>();
  }

  std::optional<std::int32_t> integer(const char* name, std::int32_t least) {
    const json* value = find(name);
    if (value == nullptr) return std::nullopt;
    // Unsigned ones beyond int64 would come out negative.
    const bool fits =
        value->is_number_integer() &&
        (!value->is_number_unsigned() || value->get<std::uint64_t>() <= kMostTokens) &&
        value->get<std::int64_t>() >= least;
    if (!fits) {
      throw wrong(
          name, *value,
          "a whole number from " + std::to_string(least) + " to " + std::to_string(kMostTokens));
    }
    return value->get<std::int32_t>();
  }

  float number(const char* name, float otherwise) {
    const json* value = find(name);
    return value == nullptr ? otherwise : number_of(name, *value);
  }

  float number_of(const char* name, const json& value) {
    if (!value.is_number() || std::abs(value.get<double>()) > std::numeric_limits<float>::max()) {
      throw wrong(name, value, "a number that a float can hold");
    }
    return value.get<float>();
  }

  Failure wrong(const char* name, const json& value, const std::string& right) const {
    std::string shown = value.dump(-1, ' ', false, json::error_handler_t::replace);
    if (shown.size() > 60) shown = shown.substr(0, 60) + "...";
    return invalid(path_ + name, path_ + name + " is " + shown + "; it must be " + right);
  }

  // Refuse what was not asked after.
  void check_all_read() const {
    for (const auto& [name, value] : object_.items()) {
      if (read_.count(name) == 0) {
        throw Failure{400, "unknown field " + path_ + name + "; take it out",
                      "invalid_request_error", path_ + name, "unknown_parameter"};
      }
    }
  }

 private:
  const json& object_;
  std::string path_;
  std::set<std::string> read_;
};

void read_prompt(Fields& fields, Completion& completion) {
  const std::string right = "a string, or an array of token ids; send a request for each prompt";
  const json* value = fields.find("prompt");
  if (value == nullptr) throw invalid("prompt", "prompt is missing; it must be " + right);
  if (value->is_string()) {
    completion.prompt = value->get<std::string>();
    return;
  }
  if (!value->is_array()) throw fields.wrong("prompt", *value, right);
  std::vector<std::int32_t> tokens;
  for (const json& each : *value) {
    if (!each.is_number_unsigned() || each.get<std::uint64_t>() > kMostTokens) {
      throw fields.wrong("prompt", *value, right);
    }
    tokens.push_back(each.get<std::int32_t>());
  }
  completion.prompt = std::move(tokens);
}

void read_stop(Fields& fields, export_grok::Params& params) {
  const json* value = fields.find("stop");
  if (value == nullptr) return;
  for (const json& each : value->is_array() ? *value : json::array({*value})) {
    if (!each.is_string()) throw fields.wrong("stop", *value, "a string or an array of strings");
    params.stop.push_back(each.get<std::string>());
  }
}

void read_bias(Fields& fields, export_grok::Params& params) {
  const std::string right = "an object of token ids to numbers from -100 to 100";
  const json* value = fields.find("logit_bias");
  if (value == nullptr) return;
  if (!value->is_object()) throw fields.wrong("logit_bias", *value, right);
  for (const auto& [name, number] : value->items()) {
    const bool digits = !name.empty() && name.size() < 10 &&
                        name.find_first_not_of("0123456789") == std::string::npos;
    if (!digits) throw fields.wrong("logit_bias", *value, right);
    params.bias.push_back({std::stoi(name), fields.number_of("logit_bias", number)});
  }
}

void read_seed(Fields& fields, export_grok::Params& params) {
  const json* value = fields.find("seed");
  if (value == nullptr) {
    std::random_device device;
    params.seed = (static_cast<std::uint64_t>(device()) << 32) | device();
    return;
  }
  if (!value->is_number_unsigned()) throw fields.wrong("seed", *value, "0 or more, below 2^64");
  params.seed = value->get<std::uint64_t>();
}

// What OpenAI has and this has not may be sent with the value that changes nothing.
void refuse_what_is_not_there(Fields& fields) {
  for (const char* name : {"n", "best_of"}) {
    if (fields.integer(name, 1).value_or(1) != 1) {
      throw invalid(name, std::string(name) + " must be 1; send a request for each answer");
    }
  }
  for (const char* name : {"presence_penalty", "frequency_penalty"}) {
    if (fields.number(name, 0.0f) != 0.0f) {
      throw invalid(name, std::string(name) + " must be 0; there is repetition_penalty");
    }
  }
  if (fields.boolean("echo")) throw invalid("echo", "echo must be false: answers come alone");
  if (const json* suffix = fields.find("suffix"); suffix != nullptr && *suffix != "") {
    throw invalid("suffix", "suffix must be empty: the model continues a prompt");
  }
}

}  // namespace

Completion completion_of(std::string_view body, const std::string& model) {
  const json object = json::parse(body, nullptr, false);
  if (object.is_discarded()) throw invalid("", "the body is no JSON");
  if (!object.is_object()) throw invalid("", "the body must be an object of JSON");
  Fields fields(object, "");

  if (const json* name = fields.find("model"); name != nullptr && *name != model) {
    Failure failure = fields.wrong("model", *name, "\"" + model + "\", or left out");
    failure.status = 404;
    failure.code = "model_not_found";
    throw failure;
  }

  Completion completion;
  read_prompt(fields, completion);
  export_grok::Params& params = completion.params;
  params.max_new_tokens = fields.integer("max_tokens", 1).value_or(16);
  params.temperature = fields.number("temperature", 1.0f);
  params.top_p = fields.number("top_p", 1.0f);
  params.top_k = fields.integer("top_k", 0).value_or(0);
  params.min_p = fields.number("min_p", 0.0f);
  params.repetition_penalty = fields.number("repetition_penalty", 1.0f);
  params.logprobs = fields.integer("logprobs", 0);
  read_seed(fields, params);
  read_stop(fields, params);
  read_bias(fields, params);
  refuse_what_is_not_there(fields);
  fields.find("user");  // OpenAI's own accounts

  completion.stream = fields.boolean("stream");
  if (const json* value = fields.find("stream_options")) {
    if (!value->is_object()) throw fields.wrong("stream_options", *value, "an object");
    if (!completion.stream) throw invalid("stream_options", "stream_options needs stream: true");
    Fields options(*value, "stream_options.");
    completion.include_usage = options.boolean("include_usage");
    options.check_all_read();
  }
  fields.check_all_read();
  return completion;
}

}  // namespace service
