#include "reply.hpp"

#include <ctime>
#include <nlohmann/json.hpp>

namespace service {

using export_grok::Finish;
using nlohmann::json;

namespace {

json usage_json(const export_grok::Usage& usage) {
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.new_tokens},
          {"total_tokens", usage.prompt_tokens + usage.new_tokens},
          {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}}};
}

std::string name_of(std::int32_t token) { return "token_id:" + std::to_string(token); }

// Texts of a client may be in it, and a message may cut one.
std::string dump(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace

std::string json_of(const Failure& failure) {
  const auto or_null = [](const std::string& text) { return text.empty() ? json() : json(text); };
  const json error = {{"message", failure.message},
                      {"type", failure.type},
                      {"param", or_null(failure.param)},
                      {"code", or_null(failure.code)}};
  return dump({{"error", error}});
}

std::string models_json(const std::string& name, long created) {
  const json model = {
      {"id", name}, {"object", "model"}, {"created", created}, {"owned_by", "export-grok"}};
  return dump({{"object", "list"}, {"data", json::array({model})}});
}

std::string health_json(const std::string& status, const export_grok::Load& load) {
  return dump({{"status", status},
               {"batch", load.batch},
               {"running", load.running},
               {"waiting", load.waiting}});
}

Reply::Reply(std::string id, std::string model, bool logprobs, bool include_usage)
    : id_(std::move(id)),
      model_(std::move(model)),
      logprobs_(logprobs),
      include_usage_(include_usage),
      created_(static_cast<long>(std::time(nullptr))) {}

void Reply::add(const export_grok::Piece& piece) {
  if (piece.logprob) {
    tokens_.push_back({*piece.token,
                       *piece.logprob,
                       {piece.top.begin(), piece.top.end()},
                       shown_ + text_.size()});
  }
  text_ += piece.text;
  finish_ = piece.finish;
}

bool Reply::has_news() const {
  return !text_.empty() || !tokens_.empty() || finish_ == Finish::stop ||
         finish_ == Finish::length;
}

std::string Reply::event() {
  json object = frame();
  object["choices"] = json::array({choice()});
  if (include_usage_) object["usage"] = nullptr;
  shown_ += text_.size();
  text_.clear();
  tokens_.clear();
  return dump(object);
}

std::string Reply::usage_event(const export_grok::Usage& usage) const {
  json object = frame();
  object["choices"] = json::array();
  object["usage"] = usage_json(usage);
  return dump(object);
}

std::string Reply::whole(const export_grok::Usage& usage) {
  json object = frame();
  object["choices"] = json::array({choice()});
  object["usage"] = usage_json(usage);
  return dump(object);
}

json Reply::frame() const {
  return {{"id", id_}, {"object", "text_completion"}, {"created", created_}, {"model", model_}};
}

json Reply::choice() {
  json reason = nullptr;
  if (finish_ == Finish::stop) reason = "stop";
  if (finish_ == Finish::length) reason = "length";
  return {{"index", 0},
          {"text", text_},
          {"logprobs", logprobs_ ? logprobs_json() : json(nullptr)},
          {"finish_reason", reason}};
}

json Reply::logprobs_json() const {
  json names = json::array(), values = json::array(), tops = json::array();
  json offsets = json::array();
  for (const TokenLogprobs& each : tokens_) {
    names.push_back(name_of(each.token));
    values.push_back(each.logprob);
    offsets.push_back(each.offset);
    json top = json::object();
    for (const export_grok::Logprob& other : each.top) top[name_of(other.token)] = other.logprob;
    tops.push_back(std::move(top));
  }
  return {{"tokens", names},
          {"token_logprobs", values},
          {"top_logprobs", tops},
          {"text_offset", offsets}};
}

}  // namespace service
