/* export_grok.hpp - Grok-1 engines from C++17: export_grok.h with owners, results and ranges.
 *
 *     #include <export_grok.hpp>
 *
 *     auto model = export_grok::Model::open("engine");
 *     if (!model) return fail(model.error().text);
 *     auto request = model->submit("In the beginning");
 *     if (!request) return fail(request.error().text);
 *     for (const auto &piece : request->pieces()) {
 *         if (!piece) return fail(piece.error().text);
 *         std::cout << piece->text << std::flush;
 *     }
 *
 * Header-only. Nothing here throws but the allocator and what a callback of yours throws; it
 * compiles with -fno-exceptions. What can fail gives a Result, which has to be looked at. With
 * EXPORT_GROK_EXCEPTIONS defined there is value_or_throw(result) beside it.
 *
 * A Model and its Requests may be used by any thread at any time, but for three things: one
 * request is pulled by one thread at a time, and neither is moved or destroyed while another
 * thread uses it. A Request may outlive its Model: it is readable to its end, EG_CANCELLED.
 */

#ifndef EXPORT_GROK_HPP
#define EXPORT_GROK_HPP

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "export_grok.h"

#ifdef EXPORT_GROK_EXCEPTIONS
#include <stdexcept>
#endif

namespace export_grok {

/* What went wrong; see eg_status. */
enum class Code : int {
  timeout = EG_TIMEOUT,
  argument = EG_ARGUMENT,
  closed = EG_CLOSED,
  bundle = EG_BUNDLE,
  config = EG_CONFIG,
  request = EG_REQUEST,
  busy = EG_BUSY,
  engine = EG_ENGINE,
  memory = EG_MEMORY,
  python = EG_PYTHON,
  internal = EG_INTERNAL
};

/* An error: its kind, for a program, and what was wrong and would be right, for a reader. */
struct Error {
  Code code = Code::internal;
  std::string text;
};

namespace detail {

/* Take the wrong way out of a Result: a mistake in the caller's code, which has not looked. */
[[noreturn]] inline void no_value(const Error& error) noexcept {
  std::fprintf(stderr, "export_grok: value() of an error: %s\n", error.text.c_str());
  std::abort();
}

inline Error last_error(eg_status status) {
  const char* text = nullptr;
  eg_last_error(&text);
  return {static_cast<Code>(status), text == nullptr ? "" : text};
}

/* A C string ends at its first zero; what stands behind one would be lost without a word. */
inline bool has_zero(std::string_view text) noexcept {
  return text.find('\0') != std::string_view::npos;
}

inline Error zero_in(const char* name) {
  return {Code::argument,
          std::string(name) + " has a zero character; take it out, or submit token ids"};
}

}  // namespace detail

/* A value or an error, as std::expected of C++23 is.
 *
 * `if (result)` tells which. value(), * and -> are for a value: of an error they end the process,
 * with its text on stderr. error() is for an error: of a value it says that there is none.
 */
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : either_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : either_(std::in_place_index<1>, std::move(error)) {}

  bool has_value() const noexcept { return either_.index() == 0; }
  explicit operator bool() const noexcept { return has_value(); }

  T& value() & { return has_value() ? *std::get_if<0>(&either_) : fail<T&>(); }
  const T& value() const& { return has_value() ? *std::get_if<0>(&either_) : fail<const T&>(); }
  T&& value() && { return std::move(value()); }

  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(value()); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  const Error& error() const& {
    static const Error none{Code::internal, "there was no error"};
    return has_value() ? none : *std::get_if<1>(&either_);
  }

 private:
  template <class R>
  [[noreturn]] R fail() const {
    detail::no_value(error());
  }

  std::variant<T, Error> either_;
};

/* No error, or one. */
template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}

  bool has_value() const noexcept { return !error_.has_value(); }
  explicit operator bool() const noexcept { return has_value(); }
  void value() const {
    if (error_) detail::no_value(*error_);
  }
  const Error& error() const& {
    static const Error none{Code::internal, "there was no error"};
    return error_ ? *error_ : none;
  }

 private:
  std::optional<Error> error_;
};

#ifdef EXPORT_GROK_EXCEPTIONS

/* An error as an exception; what() is its text. */
class Exception : public std::runtime_error {
 public:
  explicit Exception(Error error) : std::runtime_error(error.text), code_(error.code) {}

  Code code() const noexcept { return code_; }

 private:
  Code code_;
};

/* The value of a result, moved out of it; throws Exception if it is an error. */
template <class T>
T value_or_throw(Result<T> result) {
  if (!result) throw Exception(result.error());
  if constexpr (!std::is_void_v<T>) return std::move(result).value();
}

#endif /* EXPORT_GROK_EXCEPTIONS */

/* How a bundle is opened. None is the default of each: see eg_options. */
struct Options {
  std::optional<std::int32_t> batch;           /* requests that run at once */
  std::optional<std::int32_t> max_length;      /* tokens of prompt and answer */
  std::optional<std::int32_t> threads;         /* of a CPU */
  std::optional<std::int32_t> tensor_parallel; /* ranks that the bundle must be for */
  std::optional<std::int32_t> chunk;           /* tokens of prompts at once */
  std::optional<std::int32_t> max_waiting;     /* requests that may wait for a row */
  std::optional<std::string> weights_root;     /* where moved weights are */
};

/* A token and what is added to its logit: `{token, value}`. */
using Bias = eg_bias;

/* A token and its logprob: `{token, logprob}`. */
using Logprob = eg_logprob;

/* How a prompt is continued: by default greedily, to an end token or the end of the cache. */
struct Params {
  std::optional<std::int32_t> max_new_tokens; /* none: to the end of the cache */
  float temperature = 0.0f;                   /* 0: the most probable token each time */
  std::int32_t top_k = 0;                     /* 0: all */
  float top_p = 1.0f;                         /* 1: all */
  float min_p = 0.0f;                         /* 0: all */
  float repetition_penalty = 1.0f;            /* 1: none */
  std::uint64_t seed = 0;
  bool ignore_eos = false;              /* go on behind an end token */
  std::optional<std::int32_t> logprobs; /* most probable tokens told, 0 to 20 */
  std::vector<std::string> stop;        /* end the answer, and are not shown */
  std::vector<Bias> bias;
};

/* Why an answer ended; goes_on while it has not. */
enum class Finish : int {
  goes_on = EG_GOES_ON,
  stop = EG_STOP,     /* an end token or a stop string */
  length = EG_LENGTH, /* max_new_tokens, or the end of the cache */
  cancelled = EG_CANCELLED,
  failed = EG_FAILED /* the error follows */
};

/* The most probable tokens beside a chosen one, largest first: `for (Logprob each : top)`. */
class Logprobs {
 public:
  Logprobs() = default;
  Logprobs(const Logprob* first, std::size_t count) noexcept : first_(first), count_(count) {}

  const Logprob* begin() const noexcept { return first_; }
  const Logprob* end() const noexcept { return first_ + count_; }
  std::size_t size() const noexcept { return count_; }

 private:
  const Logprob* first_ = nullptr;
  std::size_t count_ = 0;
};

/* What one token added to an answer. `text` and `top` belong to the request: they are good until
 * its next piece is pulled, or it is destroyed. Copy what is to stay. */
struct Piece {
  std::string_view text;             /* whole characters, UTF-8; often none */
  std::optional<std::int32_t> token; /* none: an end without a token */
  Finish finish = Finish::goes_on;
  std::optional<float> logprob; /* of the token, if logprobs were asked for */
  Logprobs top;
};

/* An answer from where its request was read to, to its end. */
struct Answer {
  std::string text;
  std::vector<std::int32_t> tokens;
  Finish finish = Finish::goes_on;
};

/* Tokens and times of a request, so far or in all; see export_grok.runtime.Usage. */
struct Usage {
  std::int64_t prompt_tokens = 0;
  std::int64_t cached_tokens = 0;
  std::int64_t new_tokens = 0;
  double waited_seconds = 0.0;
  double first_token_seconds = 0.0;
  double decode_seconds = 0.0;
};

/* How busy a model is: rows, requests, and tokens of the cache; see export_grok.runtime.Load. */
struct Load {
  std::int64_t batch = 0;
  std::int64_t running = 0;
  std::int64_t waiting = 0;
  std::int64_t cache_tokens = 0;
  std::int64_t kept_tokens = 0;
  std::int64_t capacity = 0;
};

/* What a callback of Request::stream returns. */
enum Flow : int { Continue = 0, Cancel = 1 };

class Pieces;

/* A request under way; move-only. Letting it go cancels it if it goes on. */
class Request {
 public:
  Request(Request&& other) noexcept
      : handle_(std::exchange(other.handle_, 0)), logprobs_(other.logprobs_) {}
  Request& operator=(Request&& other) noexcept {
    Request taken(std::move(other));
    std::swap(handle_, taken.handle_);
    std::swap(logprobs_, taken.logprobs_);
    return *this;
  }
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;
  ~Request() {
    if (handle_ != 0) eg_release(handle_);
  }

  /* Wait for the next piece; none is the end of the answer.
   *
   * Errors: Code::timeout if none came in `timeout` (it can be called again), or what ended
   * the answer, behind its last piece. A negative timeout waits without end.
   */
  Result<std::optional<Piece>> next(
      std::chrono::milliseconds timeout = std::chrono::milliseconds(-1)) {
    eg_piece raw = EG_PIECE_INIT;
    const eg_status status = eg_next(handle_, timeout.count(), &raw);
    if (status == EG_END) return std::optional<Piece>();
    if (status == EG_TIMEOUT) return Error{Code::timeout, "no piece yet"};
    if (status != EG_OK) return detail::last_error(status);
    Piece piece;
    if (raw.text != nullptr) piece.text = std::string_view(raw.text, raw.length);
    if (raw.token >= 0) piece.token = raw.token;
    piece.finish = static_cast<Finish>(raw.finish);
    if (logprobs_ && raw.token >= 0) piece.logprob = raw.logprob;
    piece.top = Logprobs(raw.top, raw.top_count);
    return std::optional<Piece>(piece);
  }

  /* Call `on_piece(const Piece &)` in this thread with every piece that is left, and return why
   * the answer ended. It returns Continue, or Cancel, behind which it is not called again; or
   * nothing at all. */
  template <class OnPiece>
  Result<Finish> stream(OnPiece&& on_piece) {
    Finish finish = Finish::goes_on;
    bool wanted = true;
    while (true) {
      auto piece = next();
      if (!piece) return piece.error();
      if (!*piece) return finish;
      finish = (*piece)->finish;
      if (!wanted) continue;
      if constexpr (std::is_void_v<std::invoke_result_t<OnPiece&, const Piece&>>) {
        on_piece(**piece);
      } else if (on_piece(**piece) != Continue) {
        wanted = false;
        if (auto done = cancel(); !done) return done.error();
      }
    }
  }

  /* Every piece that is left, each a Result<Piece>: the last one may be an error. */
  Pieces pieces() &;

  /* Wait for the end and return all that is left. */
  Result<Answer> answer() {
    Answer answer;
    auto finish = stream([&](const Piece& piece) {
      answer.text += piece.text;
      if (piece.token) answer.tokens.push_back(*piece.token);
    });
    if (!finish) return finish.error();
    answer.finish = *finish;
    return answer;
  }

  /* End the answer after the token that is being computed; from any thread. Its last piece says
   * Finish::cancelled. Of an answer that has ended it does nothing. */
  Result<void> cancel() const {
    const eg_status status = eg_cancel(handle_);
    if (status != EG_OK) return detail::last_error(status);
    return {};
  }

  /* Tokens and times so far; from any thread. */
  Result<Usage> usage() const {
    eg_usage_t raw = EG_USAGE_INIT;
    const eg_status status = eg_usage(handle_, &raw);
    if (status != EG_OK) return detail::last_error(status);
    return Usage{raw.prompt_tokens,  raw.cached_tokens,       raw.new_tokens,
                 raw.waited_seconds, raw.first_token_seconds, raw.decode_seconds};
  }

  /* The handle, for the functions of export_grok.h; it stays this object's. */
  eg_request handle() const noexcept { return handle_; }

 private:
  friend class Model;
  Request(eg_request handle, bool logprobs) noexcept : handle_(handle), logprobs_(logprobs) {}

  eg_request handle_;
  bool logprobs_;
};

/* The pieces of a request as an input range. */
class Pieces {
 public:
  class iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Result<Piece>;
    using difference_type = std::ptrdiff_t;
    using pointer = const value_type*;
    using reference = const value_type&;

    iterator() = default;
    explicit iterator(Request* request) : request_(request) { ++*this; }

    reference operator*() const noexcept { return *current_; }
    pointer operator->() const noexcept { return &*current_; }
    iterator& operator++() {
      if (current_ && !*current_) { /* behind an error there is nothing */
        current_.reset();
        return *this;
      }
      auto piece = request_->next();
      if (!piece) {
        current_.emplace(piece.error());
      } else if (*piece) {
        current_.emplace(**piece);
      } else {
        current_.reset();
      }
      return *this;
    }
    void operator++(int) { ++*this; }
    /* Only whether both are at the end tells iterators of one pass apart. */
    friend bool operator==(const iterator& a, const iterator& b) noexcept {
      return a.current_.has_value() == b.current_.has_value();
    }
    friend bool operator!=(const iterator& a, const iterator& b) noexcept { return !(a == b); }

   private:
    Request* request_ = nullptr;
    std::optional<Result<Piece>> current_;
  };

  explicit Pieces(Request& request) noexcept : request_(&request) {}
  iterator begin() const { return iterator(request_); }
  iterator end() const noexcept { return iterator(); }

 private:
  Request* request_;
};

inline Pieces Request::pieces() & { return Pieces(*this); }

/* A loaded model; move-only. Letting it go cancels its requests and frees its memory. */
class Model {
 public:
  /* Open a bundle with an engine; takes as long as loading does. */
  static Result<Model> open(const std::string& bundle, const Options& options = {}) {
    if (eg_abi_version() < EG_ABI_VERSION) {
      return Error{Code::config, "libexport_grok " + std::string(eg_version()) +
                                     " is older than its header; write both again with "
                                     "export-grok c-library"};
    }
    if (detail::has_zero(bundle)) return detail::zero_in("the bundle's path");
    eg_options raw = EG_OPTIONS_INIT;
    raw.batch = options.batch.value_or(raw.batch);
    raw.max_length = options.max_length.value_or(raw.max_length);
    raw.threads = options.threads.value_or(raw.threads);
    raw.tensor_parallel = options.tensor_parallel.value_or(raw.tensor_parallel);
    raw.chunk = options.chunk.value_or(raw.chunk);
    raw.max_waiting = options.max_waiting.value_or(raw.max_waiting);
    if (options.weights_root) raw.weights_root = options.weights_root->c_str();
    eg_model handle = 0;
    const eg_status status = eg_open(bundle.c_str(), &raw, &handle);
    if (status != EG_OK) return detail::last_error(status);
    return Model(handle);
  }

  Model(Model&& other) noexcept : handle_(std::exchange(other.handle_, 0)) {}
  Model& operator=(Model&& other) noexcept {
    Model taken(std::move(other));
    std::swap(handle_, taken.handle_);
    return *this;
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;
  ~Model() {
    if (handle_ != 0) eg_close(handle_);
  }

  /* Begin to answer a prompt of UTF-8; returns at once. Code::busy: submit it later. */
  Result<Request> submit(std::string_view prompt, const Params& params = {}) const {
    if (detail::has_zero(prompt)) return detail::zero_in("the prompt");
    const std::string text(prompt);
    return submitted(params, [&](const eg_params* raw, eg_request* handle) {
      return eg_submit(handle_, text.c_str(), raw, handle);
    });
  }

  /* The same of token ids. */
  Result<Request> submit_tokens(const std::vector<std::int32_t>& tokens,
                                const Params& params = {}) const {
    return submitted(params, [&](const eg_params* raw, eg_request* handle) {
      return eg_submit_tokens(handle_, tokens.data(), tokens.size(), raw, handle);
    });
  }

  /* How busy the model is now. */
  Result<Load> load() const {
    eg_load_t raw = EG_LOAD_INIT;
    const eg_status status = eg_load(handle_, &raw);
    if (status != EG_OK) return detail::last_error(status);
    return Load{raw.batch,        raw.running,     raw.waiting,
                raw.cache_tokens, raw.kept_tokens, raw.capacity};
  }

  /* The model's metrics as Prometheus reads them, text format 0.0.4. */
  Result<std::string> metrics() const {
    std::string text;
    std::size_t length = 0;
    eg_status status = eg_metrics(handle_, nullptr, 0, &length);
    while (status == EG_TRUNCATED) { /* it may have grown between two calls */
      text.resize(length);
      status = eg_metrics(handle_, text.data(), text.size() + 1, &length);
    }
    if (status != EG_OK) return detail::last_error(status);
    text.resize(length);
    return text;
  }

  /* Close it now, with what went wrong. Later calls give Code::closed. */
  Result<void> close() const {
    const eg_status status = eg_close(handle_);
    if (status != EG_OK) return detail::last_error(status);
    return {};
  }

  /* The handle, for the functions of export_grok.h; it stays this object's. */
  eg_model handle() const noexcept { return handle_; }

 private:
  explicit Model(eg_model handle) noexcept : handle_(handle) {}

  template <class Submit>
  Result<Request> submitted(const Params& params, Submit&& submit) const {
    std::vector<const char*> stop;
    stop.reserve(params.stop.size());
    for (const std::string& each : params.stop) {
      if (detail::has_zero(each)) return detail::zero_in("a stop string");
      stop.push_back(each.c_str());
    }
    eg_params raw = EG_PARAMS_INIT;
    raw.max_new_tokens = params.max_new_tokens.value_or(raw.max_new_tokens);
    raw.top_k = params.top_k;
    raw.temperature = params.temperature;
    raw.top_p = params.top_p;
    raw.min_p = params.min_p;
    raw.repetition_penalty = params.repetition_penalty;
    raw.seed = params.seed;
    raw.ignore_eos = params.ignore_eos ? 1 : 0;
    raw.logprobs = params.logprobs.value_or(raw.logprobs);
    raw.stop = stop.data();
    raw.stop_count = stop.size();
    raw.bias = params.bias.data();
    raw.bias_count = params.bias.size();
    eg_request handle = 0;
    const eg_status status = submit(&raw, &handle);
    if (status != EG_OK) return detail::last_error(status);
    return Request(handle, raw.logprobs >= 0);
  }

  eg_model handle_;
};

/* The library's version, e.g. "0.1.0". */
inline std::string_view version() noexcept { return eg_version(); }

}  // namespace export_grok

#endif /* EXPORT_GROK_HPP */
