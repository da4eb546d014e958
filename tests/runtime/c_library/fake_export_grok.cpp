// export_grok.h without a model, for tests of what stands in front of it.
//
// A bundle is "fake:MS": a turn takes MS milliseconds and gives every running request one token.
// The answer to a prompt is the prompt itself, a character a token, over and over if ignore_eos is
// set; of token ids it is those, without text. A prompt that begins with "!fail" ends in EG_ENGINE
// behind five tokens.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "export_grok.h"

namespace {

struct Token {
  std::string text;
  int32_t id;
};

struct Request {
  std::vector<Token> tokens;
  std::deque<Token> ready;
  size_t limit = 0, made = 0;
  int finish = EG_GOES_ON;
  bool fails = false, cancelled = false, told_end = false;
  int32_t logprobs = -1;
  std::string text;  // of the last piece
  eg_logprob top{7, -0.5f};
};

struct Model {
  int turn_ms = 0;
  size_t batch = 8, max_waiting = 64;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Request>> running, waiting;
  bool closing = false;
  int64_t submitted = 0;
  std::thread thread;

  void turn() {
    while (running.size() < batch && !waiting.empty()) {
      running.push_back(waiting.front());
      waiting.pop_front();
    }
    for (auto it = running.begin(); it != running.end();) {
      Request& request = **it;
      if (request.cancelled) {
        request.finish = EG_CANCELLED;
      } else if (request.fails && request.made == 5) {
        request.finish = EG_FAILED;
      } else {
        request.ready.push_back(request.tokens[request.made % request.tokens.size()]);
        if (++request.made == request.limit) request.finish = EG_LENGTH;
      }
      it = request.finish != EG_GOES_ON ? running.erase(it) : it + 1;
    }
    for (auto it = waiting.begin(); it != waiting.end();) {
      if ((*it)->cancelled) (*it)->finish = EG_CANCELLED;
      it = (*it)->cancelled ? waiting.erase(it) : it + 1;
    }
    changed.notify_all();
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return closing || !running.empty() || !waiting.empty(); });
      if (closing) break;
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(turn_ms));
      lock.lock();
      turn();
    }
    for (auto* queue : {&running, &waiting}) {
      for (auto& request : *queue) request->finish = EG_CANCELLED;
      queue->clear();
    }
    changed.notify_all();
  }
};

struct Held {
  std::shared_ptr<Model> model;
  std::shared_ptr<Request> request;
};

std::mutex table_mutex;
std::map<uint64_t, Held> table;
uint64_t last_handle = 0;

thread_local eg_status last_status = EG_OK;
thread_local std::string last_text;

eg_status fail(eg_status status, std::string text) {
  last_status = status;
  last_text = std::move(text);
  return status;
}

uint64_t add(Held held) {
  std::lock_guard<std::mutex> lock(table_mutex);
  table[++last_handle] = std::move(held);
  return last_handle;
}

Held find(uint64_t handle, bool take = false) {
  std::lock_guard<std::mutex> lock(table_mutex);
  auto found = table.find(handle);
  if (found == table.end()) return {};
  Held held = found->second;
  if (take) table.erase(found);
  return held;
}

eg_status closed(uint64_t handle) {
  return fail(EG_CLOSED, "handle " + std::to_string(handle) + " is closed or never was");
}

eg_status submit(eg_model handle, std::vector<Token> tokens, bool fails, const eg_params* given,
                 eg_request* out) {
  eg_params params = EG_PARAMS_INIT;
  if (given != nullptr) params = *given;
  Held held = find(handle);
  if (!held.model || held.request) return closed(handle);
  if (tokens.empty()) return fail(EG_REQUEST, "the prompt is empty");
  if (params.temperature < 0) {
    return fail(EG_REQUEST, "temperature is negative; it must be 0 or more");
  }
  if (params.stop_count > 16) return fail(EG_REQUEST, "stop has too many texts");
  auto request = std::make_shared<Request>();
  request->limit = params.ignore_eos != 0 ? SIZE_MAX : tokens.size();
  if (params.max_new_tokens > 0) {
    request->limit = std::min(request->limit, static_cast<size_t>(params.max_new_tokens));
  }
  request->tokens = std::move(tokens);
  request->fails = fails;
  request->logprobs = params.logprobs;
  Model& model = *held.model;
  {
    std::lock_guard<std::mutex> lock(model.mutex);
    if (model.closing) return closed(handle);
    if (model.running.size() + model.waiting.size() >= model.batch + model.max_waiting) {
      return fail(EG_BUSY, "as many requests wait as may");
    }
    model.waiting.push_back(request);
    ++model.submitted;
    model.changed.notify_all();
  }
  *out = add({held.model, request});
  return EG_OK;
}

}  // namespace

const char* eg_version(void) { return "0.0.0-fake"; }
int eg_abi_version(void) { return EG_ABI_VERSION; }

eg_status eg_open(const char* bundle, const eg_options* options, eg_model* handle) {
  if (bundle == nullptr || handle == nullptr) return fail(EG_ARGUMENT, "a pointer is null");
  if (std::strncmp(bundle, "fake:", 5) != 0) {
    return fail(EG_BUNDLE, std::string(bundle) + " is no bundle");
  }
  auto model = std::make_shared<Model>();
  model->turn_ms = std::stoi(bundle + 5);
  if (options != nullptr && options->batch > 0) {
    model->batch = static_cast<size_t>(options->batch);
  }
  if (options != nullptr && options->max_waiting >= 0) {
    model->max_waiting = static_cast<size_t>(options->max_waiting);
  }
  model->thread = std::thread(&Model::run, model.get());
  *handle = add({model, nullptr});
  return EG_OK;
}

eg_status eg_close(eg_model handle) {
  Held held = find(handle);
  if (!held.model || held.request) return closed(handle);
  if (!find(handle, true).model) return closed(handle);
  {
    std::lock_guard<std::mutex> lock(held.model->mutex);
    held.model->closing = true;
    held.model->changed.notify_all();
  }
  held.model->thread.join();
  return EG_OK;
}

eg_status eg_submit(eg_model model, const char* prompt, const eg_params* params,
                    eg_request* request) {
  if (prompt == nullptr || request == nullptr) return fail(EG_ARGUMENT, "a pointer is null");
  std::vector<Token> tokens;
  for (const char* at = prompt; *at != '\0'; ++at) {
    if ((*at & 0xC0) != 0x80) tokens.push_back({"", static_cast<int32_t>(tokens.size())});
    tokens.back().text += *at;
  }
  return submit(model, tokens, std::strncmp(prompt, "!fail", 5) == 0, params, request);
}

eg_status eg_submit_tokens(eg_model model, const int32_t* ids, size_t count,
                           const eg_params* params, eg_request* request) {
  if ((ids == nullptr && count > 0) || request == nullptr) {
    return fail(EG_ARGUMENT, "a pointer is null");
  }
  std::vector<Token> tokens;
  for (size_t i = 0; i < count; ++i) tokens.push_back({"", ids[i]});
  return submit(model, tokens, false, params, request);
}

eg_status eg_next(eg_request handle, int64_t timeout_ms, eg_piece* piece) {
  Held held = find(handle);
  if (!held.request) return closed(handle);
  Request& request = *held.request;
  std::unique_lock<std::mutex> lock(held.model->mutex);
  auto something = [&] { return !request.ready.empty() || request.finish != EG_GOES_ON; };
  if (timeout_ms < 0) {
    held.model->changed.wait(lock, something);
  } else if (!held.model->changed.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                                           something)) {
    return EG_TIMEOUT;
  }
  *piece = EG_PIECE_INIT;
  request.text.clear();
  if (!request.ready.empty()) {
    request.text = request.ready.front().text;
    piece->token = request.ready.front().id;
    request.ready.pop_front();
    if (request.logprobs >= 0) {
      piece->logprob = -0.5f;
      piece->top = &request.top;
      piece->top_count = request.logprobs > 0 ? 1 : 0;
    }
  } else if (request.told_end) {
    return request.finish == EG_FAILED ? fail(EG_ENGINE, "a rank died") : EG_END;
  }
  piece->text = request.text.c_str();
  piece->length = request.text.size();
  if (request.ready.empty() && request.finish != EG_GOES_ON) {
    piece->finish = request.finish;
    request.told_end = true;
  }
  return EG_OK;
}

eg_status eg_stream(eg_request handle, eg_on_piece on_piece, void* user) {
  while (true) {
    eg_piece piece = EG_PIECE_INIT;
    const eg_status status = eg_next(handle, -1, &piece);
    if (status != EG_OK) return status;
    if (on_piece(user, &piece) != 0) eg_cancel(handle);
  }
}

eg_status eg_cancel(eg_request handle) {
  Held held = find(handle);
  if (!held.request) return closed(handle);
  std::lock_guard<std::mutex> lock(held.model->mutex);
  held.request->cancelled = true;
  held.model->changed.notify_all();
  return EG_OK;
}

eg_status eg_usage(eg_request handle, eg_usage_t* usage) {
  Held held = find(handle);
  if (!held.request) return closed(handle);
  std::lock_guard<std::mutex> lock(held.model->mutex);
  *usage = EG_USAGE_INIT;
  usage->prompt_tokens = static_cast<int64_t>(held.request->tokens.size());
  usage->new_tokens = static_cast<int64_t>(held.request->made);
  return EG_OK;
}

eg_status eg_release(eg_request handle) {
  const eg_status status = eg_cancel(handle);
  if (status == EG_OK) find(handle, true);
  return status;
}

eg_status eg_load(eg_model handle, eg_load_t* load) {
  Held held = find(handle);
  if (!held.model || held.request) return closed(handle);
  std::lock_guard<std::mutex> lock(held.model->mutex);
  *load = EG_LOAD_INIT;
  load->batch = static_cast<int64_t>(held.model->batch);
  load->running = static_cast<int64_t>(held.model->running.size());
  load->waiting = static_cast<int64_t>(held.model->waiting.size());
  return EG_OK;
}

eg_status eg_metrics(eg_model handle, char* buffer, size_t capacity, size_t* length) {
  Held held = find(handle);
  if (!held.model || held.request) return closed(handle);
  std::lock_guard<std::mutex> lock(held.model->mutex);
  const std::string text =
      "# TYPE fake_requests_submitted counter\nfake_requests_submitted_total " +
      std::to_string(held.model->submitted) + "\n";
  *length = text.size();
  if (buffer == nullptr || capacity <= text.size()) return EG_TRUNCATED;
  std::memcpy(buffer, text.c_str(), text.size() + 1);
  return EG_OK;
}

eg_status eg_last_error(const char** text) {
  if (text != nullptr) *text = last_text.c_str();
  return last_status;
}
