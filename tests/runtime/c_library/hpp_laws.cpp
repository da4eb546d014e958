// Laws of export_grok.hpp, held on fake_export_grok.cpp: `hpp_laws NAME` checks one.

#define EXPORT_GROK_EXCEPTIONS
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <map>
#include <thread>

#include "export_grok.hpp"

namespace eg = export_grok;
using namespace std::chrono_literals;

static_assert(!std::is_copy_constructible_v<eg::Model> && !std::is_copy_assignable_v<eg::Model>);
static_assert(!std::is_copy_constructible_v<eg::Request>);
static_assert(std::is_nothrow_move_constructible_v<eg::Model>);
static_assert(std::is_nothrow_move_assignable_v<eg::Request>);
static_assert(std::is_nothrow_destructible_v<eg::Model>);
static_assert(std::is_nothrow_destructible_v<eg::Request>);

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

namespace {

const std::string FAMILY = "日本語 👩‍👩‍👧 é";

eg::Model opened(eg::Options options = {}, const std::string& bundle = "fake:1") {
  return eg::value_or_throw(eg::Model::open(bundle, options));
}

eg::Params endless() {
  eg::Params params;
  params.ignore_eos = true;
  return params;
}

bool until(const std::function<bool()>& reached) {
  for (int look = 0; look < 2000; ++look) {
    if (reached()) return true;
    std::this_thread::sleep_for(5ms);
  }
  return false;
}

const std::map<std::string, std::function<void()>> LAWS = {
    {"pull_stream_range_and_answer_give_the_same",
     [] {
       auto model = opened();
       std::string pulled, streamed, ranged;
       auto request = model.submit(FAMILY).value();
       for (auto piece = request.next(); *piece; piece = request.next()) {
         CHECK(piece);
         pulled += (*piece)->text;
       }
       auto finish = model.submit(FAMILY).value().stream(
           [&](const eg::Piece& piece) { streamed += piece.text; });
       CHECK(*finish == eg::Finish::length);
       auto third = model.submit(FAMILY).value();
       for (const auto& piece : third.pieces()) ranged += piece->text;
       auto answer = model.submit(FAMILY).value().answer();
       CHECK(pulled == FAMILY && streamed == FAMILY && ranged == FAMILY);
       CHECK(answer->text == FAMILY && answer->finish == eg::Finish::length);
       CHECK(answer->tokens.size() == 11);
     }},
    {"an_error_in_mid_answer_comes_behind_its_pieces",
     [] {
       auto model = opened();
       std::string text;
       int errors = 0;
       auto request = model.submit("!failing answers").value();
       for (const auto& piece : request.pieces()) {
         CHECK(errors == 0);
         if (piece) {
           text += piece->text;
         } else {
           ++errors;
           CHECK(piece.error().code == eg::Code::engine);
           CHECK(piece.error().text == "a rank died");
         }
       }
       CHECK(errors == 1 && text == "!fail");
       auto answer = model.submit("!failing answers").value().answer();
       CHECK(!answer && answer.error().code == eg::Code::engine);
     }},
    {"a_callback_that_cancels_is_not_called_again",
     [] {
       auto model = opened();
       int calls = 0;
       auto request = model.submit("abc", endless()).value();
       auto finish = request.stream(
           [&](const eg::Piece&) { return ++calls == 3 ? eg::Cancel : eg::Continue; });
       CHECK(finish && *finish == eg::Finish::cancelled && calls == 3);
     }},
    {"a_callback_may_throw",
     [] {
       auto model = opened();
       {
         auto request = model.submit("abc", endless()).value();
         try {
           (void)request.stream([](const eg::Piece&) -> eg::Flow { throw 7; });
           CHECK(false);
         } catch (int thrown) {
           CHECK(thrown == 7);
         }
         CHECK(request.next().has_value());
       }
       CHECK(until([&] { return model.load()->running == 0; }));
     }},
    {"no_piece_in_time_is_a_timeout_that_can_be_repeated",
     [] {
       auto model = opened({}, "fake:30");
       auto request = model.submit("a").value();
       auto piece = request.next(1ms);
       CHECK(!piece && piece.error().code == eg::Code::timeout);
       while (!piece && piece.error().code == eg::Code::timeout) piece = request.next(1ms);
       CHECK(piece && *piece && (*piece)->text == "a");
     }},
    {"letting_a_request_go_frees_its_row",
     [] {
       auto model = opened();
       {
         auto request = model.submit("abc", endless()).value();
       }
       auto second = model.submit("abc", endless()).value();
       second = model.submit("ab").value();
       CHECK(second.answer()->text == "ab");
       CHECK(until([&] { return model.load()->running == 0; }));
     }},
    {"another_thread_may_cancel",
     [] {
       auto model = opened();
       auto request = model.submit("abc", endless()).value();
       std::thread other([&] { CHECK(request.cancel()); });
       CHECK(request.answer()->finish == eg::Finish::cancelled);
       other.join();
       CHECK(request.cancel());
     }},
    {"what_was_moved_from_is_closed",
     [] {
       auto model = opened();
       auto request = model.submit("abc").value();
       auto taken = std::move(request);
       CHECK(request.next().error().code == eg::Code::closed);
       CHECK(request.usage().error().code == eg::Code::closed);
       auto& self = taken;
       taken = std::move(self);
       CHECK(taken.answer()->text == "abc");
       auto other = std::move(model);
       CHECK(model.load().error().code == eg::Code::closed);
       CHECK(other.submit("abc"));
     }},
    {"a_closed_model_says_so_and_its_requests_are_readable",
     [] {
       auto model = opened();
       auto request = model.submit("abc", endless()).value();
       CHECK(model.close());
       CHECK(request.answer()->finish == eg::Finish::cancelled);
       CHECK(model.close().error().code == eg::Code::closed);
       CHECK(model.submit("abc").error().code == eg::Code::closed);
       CHECK(model.metrics().error().code == eg::Code::closed);
     }},
    {"errors_have_code_and_text",
     [] {
       auto none = eg::Model::open("nowhere");
       CHECK(!none && none.error().code == eg::Code::bundle);
       CHECK(none.error().text == "nowhere is no bundle");
       auto model = opened();
       eg::Params params;
       params.temperature = -1;
       CHECK(model.submit("a", params).error().code == eg::Code::request);
       CHECK(model.submit("").error().code == eg::Code::request);
       CHECK(model.submit_tokens({}).error().code == eg::Code::request);
     }},
    {"a_zero_in_a_text_is_refused_and_not_cut_at",
     [] {
       using namespace std::string_literals;
       auto model = opened();
       CHECK(model.submit("a\0b"s).error().code == eg::Code::argument);
       eg::Params params;
       params.stop = {"a\0b"s};
       CHECK(model.submit("a", params).error().code == eg::Code::argument);
       CHECK(eg::Model::open("fake:1\0"s).error().code == eg::Code::argument);
     }},
    {"as_many_wait_as_may",
     [] {
       eg::Options options;
       options.batch = 1;
       options.max_waiting = 1;
       auto model = opened(options);
       auto first = model.submit("abc", endless()).value();
       auto second = model.submit("abc", endless()).value();
       CHECK(model.submit("abc").error().code == eg::Code::busy);
       CHECK(first.cancel());
       CHECK(until([&] { return model.submit("abc").has_value(); }));
     }},
    {"logprobs_are_there_if_asked_for",
     [] {
       auto model = opened();
       eg::Params params;
       CHECK(!(*model.submit("a").value().next())->logprob);
       params.logprobs = 1;
       auto request = model.submit("a", params).value();
       auto piece = request.next();
       CHECK((*piece)->logprob == -0.5f && (*piece)->top.size() == 1);
       for (eg::Logprob each : (*piece)->top) CHECK(each.token == 7);
     }},
    {"usage_load_metrics_and_version_are_told",
     [] {
       auto model = opened();
       auto request = model.submit_tokens({4, 5, 6}).value();
       CHECK((request.answer()->tokens == std::vector<std::int32_t>{4, 5, 6}));
       CHECK(request.usage()->prompt_tokens == 3 && request.usage()->new_tokens == 3);
       CHECK(model.load()->batch == 8);
       CHECK(model.metrics()->find("submitted_total 1\n") != std::string::npos);
       CHECK(eg::version() == "0.0.0-fake");
     }},
    {"exceptions_are_opt_in",
     [] {
       try {
         eg::value_or_throw(eg::Model::open("nowhere"));
         CHECK(false);
       } catch (const eg::Exception& error) {
         CHECK(error.code() == eg::Code::bundle);
         CHECK(std::string(error.what()) == "nowhere is no bundle");
       }
       auto model = opened();
       eg::value_or_throw(model.close());
     }},
    {"sixteen_threads_may_use_a_model",
     [] {
       eg::Options options;
       options.batch = 4;
       auto model = opened(options, "fake:0");
       std::vector<std::thread> threads;
       for (int number = 0; number < 16; ++number) {
         threads.emplace_back([&model, number] {
           for (int turn = 0; turn < 30; ++turn) {
             auto prompt = std::to_string(number) + " " + std::to_string(turn);
             auto request = model.submit(prompt).value();
             if (turn % 3 == 0) {
               CHECK(request.next());
               CHECK(request.cancel());
             } else {
               CHECK(request.answer()->text == prompt);
             }
             CHECK(request.usage() && model.load() && model.metrics());
           }
         });
       }
       for (auto& thread : threads) thread.join();
     }},
    {"looking_away_from_an_error_ends_with_its_text",
     [] { (void)eg::Model::open("nowhere").value(); }},
};

}  // namespace

int main(int count, char** arguments) {
  CHECK(count == 2 && LAWS.count(arguments[1]) == 1);
  LAWS.at(arguments[1])();
}
