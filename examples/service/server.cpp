#include "server.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <memory>
#include <thread>
#include <utility>

#include "failure.hpp"

namespace service {

using export_grok::Code;
using export_grok::Finish;
using namespace std::chrono_literals;

namespace {

// How often a request without news looks whether its client has gone, or the service ends.
constexpr auto kLook = 100ms;

// Connections beyond those of requests: health checks, metrics, clients between two requests.
constexpr std::size_t kSpareThreads = 32;

// Connections that may wait to be taken.
constexpr int kBacklog = 1024;

constexpr const char* kJson = "application/json";

void send(httplib::Response& response, const Failure& failure) {
  response.status = failure.status;
  if (failure.status == 429) response.set_header("Retry-After", "1");
  response.set_content(json_of(failure), kJson);
}

}  // namespace

// One completion under way, with what its line in the log says.
struct Server::Work {
  Work(export_grok::Request taken, Reply begun, Connection from, bool with_usage)
      : request(std::move(taken)),
        reply(std::move(begun)),
        connection(std::move(from)),
        include_usage(with_usage) {}

  void log(std::string end) const {
    std::replace(end.begin(), end.end(), '\n', ' ');
    const auto usage = request.usage();
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    std::fprintf(stderr, "POST /v1/completions %s: %lld prompt, %lld new tokens, %.3f s\n",
                 end.c_str(), usage ? static_cast<long long>(usage->prompt_tokens) : 0LL,
                 usage ? static_cast<long long>(usage->new_tokens) : 0LL, seconds);
  }

  export_grok::Request request;
  Reply reply;
  Connection connection;
  bool include_usage;
  std::chrono::steady_clock::time_point begun = std::chrono::steady_clock::now();
};

Server::Server(const export_grok::Model& model, const Options& options)
    : model_(model),
      options_(options),
      name_(options.model_name()),
      started_(static_cast<long>(std::time(nullptr))) {
  set_limits();
  route();
}

int Server::bind() {
  int port = options_.port;
  if (port == 0) {
    port = http_.bind_to_any_port(options_.host);
  } else if (!http_.bind_to_port(options_.host, port)) {
    port = -1;
  }
  // httplib lets 5 connections wait to be taken; the sixth of a burst would try again in a second.
  if (port > 0) listen(socket_, kBacklog);
  return port;
}

void Server::run() {
  http_.listen_after_bind();
  ended_ = true;
}

void Server::drain() {
  draining_ = true;
  // httplib does not hear a stop before it listens.
  while (!http_.is_running() && !ended_) std::this_thread::sleep_for(1ms);
  http_.stop();
}

void Server::set_limits() {
  // All that may run and wait, and some more: streams never keep a health check out.
  const auto load = model_.load();
  const auto batch = static_cast<std::size_t>(load ? load->batch : 0);
  const auto waiting = static_cast<std::size_t>(options_.model.max_waiting.value_or(64));
  http_.new_task_queue = [threads = batch + waiting + kSpareThreads] {
    return new httplib::ThreadPool(threads);
  };
  http_.set_socket_options([this](int socket) {
    socket_ = socket;
    // And not SO_REUSEPORT, httplib's own choice: two services would share a port, and its
    // clients.
    const int yes = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  });
  http_.set_tcp_nodelay(true);      // small pieces go out at once
  http_.set_keep_alive_timeout(2);  // an idle connection has a thread, and holds up the end
  http_.set_keep_alive_max_count(1000);
  http_.set_payload_max_length(options_.max_body);
}

void Server::route() {
  http_.Post("/v1/completions",
             [this](const httplib::Request& request, httplib::Response& response,
                    const httplib::ContentReader& read) { complete(request, response, read); });
  http_.Get("/v1/models", [this](const httplib::Request&, httplib::Response& response) {
    response.set_content(models_json(name_, started_), kJson);
  });
  http_.Get("/health",
            [this](const httplib::Request&, httplib::Response& response) { health(response); });
  http_.Get("/metrics", [this](const httplib::Request&, httplib::Response& response) {
    const auto text = model_.metrics();
    if (!text) return send(response, failure_of(text.error()));
    response.set_content(*text, "text/plain; version=0.0.4; charset=utf-8");
  });
  http_.set_error_handler([](const httplib::Request& request, httplib::Response& response) {
    if (!response.body.empty()) return;  // it says what it is
    const std::string what = response.status == 404
                                 ? "there is no " + request.method + " " + request.path
                                 : "the request is not understood";
    send(response, {response.status, what, "invalid_request_error", "", ""});
  });
  http_.set_exception_handler(
      [](const httplib::Request&, httplib::Response& response, std::exception_ptr) {
        send(response, {500, "a mistake of the service", "server_error", "", "internal"});
      });
  http_.set_logger([](const httplib::Request& request, const httplib::Response& response) {
    // Answers write their own line, at their end. The target is as it came, without line breaks.
    if (request.path == "/v1/completions" && response.status == 200) return;
    // A body of JSON has none either; it says what failed.
    std::fprintf(stderr, "%s %s %d %s\n", request.method.c_str(), request.target.c_str(),
                 response.status, response.status < 500 ? "" : response.body.c_str());
  });
}

void Server::complete(const httplib::Request& request, httplib::Response& response,
                      const httplib::ContentReader& read) {
  try {
    const Completion asked = completion_of(body_of(request, read), name_);
    auto submitted = std::holds_alternative<std::string>(asked.prompt)
                         ? model_.submit(std::get<0>(asked.prompt), asked.params)
                         : model_.submit_tokens(std::get<1>(asked.prompt), asked.params);
    if (!submitted) throw failure_of(submitted.error());
    const auto work = std::make_shared<Work>(
        std::move(*submitted),
        Reply(next_id(), name_, asked.params.logprobs.has_value(), asked.include_usage),
        Connection(request), asked.include_usage);
    if (!asked.stream) return answer(*work, response);
    response.set_header("Cache-Control", "no-cache");
    response.set_chunked_content_provider("text/event-stream",
                                          [this, work](std::size_t, httplib::DataSink& sink) {
                                            stream(*work, sink);
                                            return true;
                                          });
  } catch (const Failure& failure) {
    send(response, failure);
  }
}

void Server::answer(Work& work, httplib::Response& response) {
  pull(work, [] { return true; });
  const auto usage = work.request.usage();
  if (!usage) throw failure_of(usage.error());
  response.set_content(work.reply.whole(*usage), kJson);
  work.log("200");
}

// All of a stream is written here, in one call: between calls httplib would end it at `drain`.
void Server::stream(Work& work, httplib::DataSink& sink) {
  const auto write = [&](const std::string& data) {
    const std::string event = "data: " + data + "\n\n";
    return sink.write(event.data(), event.size());
  };
  try {
    pull(work, [&] { return !work.reply.has_news() || write(work.reply.event()); });
    if (const auto usage = work.request.usage(); usage && work.include_usage) {
      write(work.reply.usage_event(*usage));
    }
    write("[DONE]");
    work.log("200");
  } catch (const Failure& failure) {
    write(json_of(failure));
    work.log(failure.message);
  }
  sink.done();
}

// Take all pieces; `on_piece` is called behind each and says whether they are still wanted.
// Throws Failure if the answer did not come to its end.
void Server::pull(Work& work, const std::function<bool()>& on_piece) {
  while (true) {
    const auto piece = work.request.next(kLook);
    if (!piece && piece.error().code != Code::timeout) throw failure_of(piece.error());
    if (piece && !*piece) break;
    bool wanted = work.connection.is_open();
    if (wanted && piece && (*piece)->finish != Finish::cancelled) {
      work.reply.add(**piece);
      wanted = on_piece();
    }
    // Whoever has gone reads no failure; letting the request go cancels it.
    if (!wanted) throw Failure{499, "the client has gone"};
    if (cancelled_ || (piece && (*piece)->finish == Finish::cancelled)) {
      throw Failure{503, "the service is ending", "server_error", "", "unavailable"};
    }
  }
}

void Server::health(httplib::Response& response) {
  const auto load = model_.load();
  if (!load) return send(response, failure_of(load.error()));
  response.status = draining_ ? 503 : 200;
  response.set_content(health_json(draining_ ? "ending" : "ok", *load), kJson);
}

// httplib's own limit does not hold for a body that comes in chunks or compressed.
std::string Server::body_of(const httplib::Request& request,
                            const httplib::ContentReader& read) const {
  if (request.is_multipart_form_data()) {
    throw Failure{415, "the body must be JSON", "invalid_request_error", "", ""};
  }
  if (!request.has_header("Content-Length") && !request.has_header("Transfer-Encoding")) {
    throw invalid("", "the request has no body");
  }
  const Failure too_long{413,
                         "the body is longer than " + std::to_string(options_.max_body) + " bytes",
                         "invalid_request_error", "", "body_too_long"};
  std::string body;
  std::size_t length = 0;
  const bool whole = read([&](const char* data, std::size_t count) {
    length += count;
    if (length <= options_.max_body) body.append(data, count);
    return length <= 16 * options_.max_body;  // what is read and dropped keeps the connection
  });
  if (length > options_.max_body) throw too_long;
  if (!whole) {
    const auto announced = request.get_header_value<std::uint64_t>("Content-Length");
    if (announced > options_.max_body) throw too_long;
    throw invalid("", "the body ended before its length");
  }
  return body;
}

std::string Server::next_id() {
  return "cmpl-" + std::to_string(started_) + "-" + std::to_string(++count_);
}

}  // namespace service
