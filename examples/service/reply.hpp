// What is sent, as JSON that OpenAI's clients read.
#pragma once

#include <export_grok.hpp>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "failure.hpp"

namespace service {

// {"error": {"message", "type", "param", "code"}}.
std::string json_of(const Failure& failure);

// The list of one model, by its name and the time that it was loaded.
std::string models_json(const std::string& name, long created);

// How the service is, "ok" or another word, and how busy.
std::string health_json(const std::string& status, const export_grok::Load& load);

// Collects the pieces of one answer.
//
// The library's pieces are texts, not tokens: with logprobs, tokens are named by their ids,
// "token_id:17", and `text_offset` counts the bytes before a token's piece.
class Reply {
 public:
  // `id`: of the answer; `logprobs`: whether tokens are told; `include_usage`: as a stream's
  // events say that there is more to come.
  Reply(std::string id, std::string model, bool logprobs, bool include_usage);

  // Add a piece.
  void add(const export_grok::Piece& piece);

  // Whether there is something to tell since the last event; a failure is not told by one.
  bool has_news() const;

  // The JSON of a stream's event with what came since the last one.
  std::string event();

  // The JSON of the event behind the last piece, if the client asked for it.
  std::string usage_event(const export_grok::Usage& usage) const;

  // The JSON of the whole answer.
  std::string whole(const export_grok::Usage& usage);

  // Why the answer ended; goes_on while it has not.
  export_grok::Finish finish() const { return finish_; }

 private:
  struct TokenLogprobs {
    std::int32_t token;
    float logprob;
    std::vector<export_grok::Logprob> top;
    std::size_t offset;
  };

  nlohmann::json frame() const;
  nlohmann::json choice();
  nlohmann::json logprobs_json() const;

  std::string id_;
  std::string model_;
  bool logprobs_;
  bool include_usage_;
  long created_;
  std::string text_;
  std::size_t shown_ = 0;  // bytes in events before this one
  std::vector<TokenLogprobs> tokens_;
  export_grok::Finish finish_ = export_grok::Finish::goes_on;
};

}  // namespace service
