#include "options.hpp"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>

namespace service {
namespace {

constexpr const char* kHelp =
    "usage: grok-service --bundle DIR [options]\n"
    "\n"
    "Serves an engine's bundle as POST /v1/completions, GET /v1/models, /health, /metrics.\n"
    "\n"
    "  --bundle DIR       of an engine that export-grok built\n"
    "  --weights-root DIR where its weights are, if they were moved\n"
    "  --host ADDRESS     127.0.0.1 by default\n"
    "  --port N           8000 by default; 0: any that is free, told on stdout\n"
    "  --batch N          requests that run at once\n"
    "  --max-length N     tokens of prompt and answer together\n"
    "  --threads N        of the CPU\n"
    "  --max-waiting N    requests that may wait for a row; more are told 429\n"
    "  --max-body BYTES   of a request, 1000000 by default; longer ones are told 413\n"
    "  --grace SECONDS    for what runs at SIGTERM or SIGINT, 10 by default; a second signal\n"
    "                     ends it at once\n";

[[noreturn]] void refuse(const std::string& message) {
  std::fprintf(stderr, "grok-service: %s\n\n%s", message.c_str(), kHelp);
  std::exit(2);
}

long whole(const std::string& name, const std::string& text, long least, long most) {
  char* end = nullptr;
  errno = 0;
  const long value = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno != 0 || value < least || value > most) {
    refuse(name + " is '" + text + "'; it must be a whole number from " + std::to_string(least) +
           " to " + std::to_string(most));
  }
  return value;
}

std::chrono::milliseconds seconds(const std::string& name, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(value >= 0 && value <= 86400)) {
    refuse(name + " is '" + text + "'; it must be seconds from 0 to 86400");
  }
  return std::chrono::milliseconds(std::lround(value * 1000));
}

}  // namespace

std::string Options::model_name() const {
  const auto folder = std::filesystem::path(bundle).lexically_normal();
  const auto name = folder.has_filename() ? folder.filename() : folder.parent_path().filename();
  return name.string();
}

Options options_of(int count, char** arguments) {
  constexpr long kMost = std::numeric_limits<std::int32_t>::max();
  Options options;
  for (int at = 1; at < count; ++at) {
    const std::string name = arguments[at];
    if (name == "--help") {
      std::fputs(kHelp, stdout);
      std::exit(0);
    }
    if (at + 1 == count) refuse(name + " has no value");
    const std::string value = arguments[++at];
    const auto number = [&](long least) {
      return static_cast<std::int32_t>(whole(name, value, least, kMost));
    };
    if (name == "--bundle") {
      options.bundle = value;
    } else if (name == "--weights-root") {
      options.model.weights_root = value;
    } else if (name == "--host") {
      options.host = value;
    } else if (name == "--port") {
      options.port = static_cast<int>(whole(name, value, 0, 65535));
    } else if (name == "--batch") {
      options.model.batch = number(1);
    } else if (name == "--max-length") {
      options.model.max_length = number(2);
    } else if (name == "--threads") {
      options.model.threads = number(1);
    } else if (name == "--max-waiting") {
      options.model.max_waiting = number(0);
    } else if (name == "--max-body") {
      options.max_body = static_cast<std::size_t>(whole(name, value, 1, kMost));
    } else if (name == "--grace") {
      options.grace = seconds(name, value);
    } else {
      refuse("unknown option " + name);
    }
  }
  if (options.bundle.empty()) refuse("--bundle is missing");
  return options;
}

}  // namespace service
