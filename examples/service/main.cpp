// grok-service: an engine of export-grok behind OpenAI's completions API, in one process.
#include <cstdio>
#include <export_grok.hpp>
#include <thread>

#include "options.hpp"
#include "server.hpp"
#include "signals.hpp"

int main(int count, char** arguments) {
  const service::Options options = service::options_of(count, arguments);
  const auto model = export_grok::Model::open(options.bundle, options.model);
  if (!model) {
    std::fprintf(stderr, "grok-service: %s\n", model.error().text.c_str());
    return 1;
  }

  service::Server server(*model, options);
  const int port = server.bind();
  if (port < 0) {
    std::fprintf(stderr, "grok-service: %s:%d cannot be had; is another service there?\n",
                 options.host.c_str(), options.port);
    return 1;
  }

  service::Signals signals;
  std::thread ending([&] {
    signals.wait();
    server.drain();
    signals.wait(options.grace);
    server.cancel();
  });
  std::printf("listening on http://%s:%d\n", options.host.c_str(), port);
  std::fflush(stdout);
  server.run();
  signals.end();  // nothing is left to wait for
  ending.join();
  return 0;
}
