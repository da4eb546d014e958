// The HTTP side: what is answered where, and how it ends.
#pragma once

#include <httplib.h>

#include <atomic>
#include <export_grok.hpp>
#include <functional>
#include <string>

#include "completion.hpp"
#include "connection.hpp"
#include "options.hpp"
#include "reply.hpp"

namespace service {

// A server in front of a model, which must outlive it. Each connection has a thread.
class Server {
 public:
  Server(const export_grok::Model& model, const Options& options);

  // Take the address; returns its port, or -1 if it cannot be had.
  int bind();

  // Serve until `drain`, and until what runs by then is answered.
  void run();

  // Take no more connections; what runs goes on. From any thread, after `bind`.
  void drain();

  // Cancel what runs.
  void cancel() { cancelled_ = true; }

 private:
  struct Work;

  void set_limits();
  void route();
  void complete(const httplib::Request& request, httplib::Response& response,
                const httplib::ContentReader& read);
  void answer(Work& work, httplib::Response& response);
  void stream(Work& work, httplib::DataSink& sink);
  void pull(Work& work, const std::function<bool()>& on_piece);
  void health(httplib::Response& response);
  std::string body_of(const httplib::Request& request, const httplib::ContentReader& read) const;
  std::string next_id();

  const export_grok::Model& model_;
  const Options options_;
  const std::string name_;
  const long started_;
  httplib::Server http_;
  int socket_ = -1;  // that connections come to
  std::atomic<bool> draining_{false};
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> ended_{false};
  std::atomic<unsigned long> count_{0};
};

}  // namespace service
