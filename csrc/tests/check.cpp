// Runs every test that is linked into this program, or those whose names contain the argument.

#include "check.h"

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <vector>

namespace torch_odt::tests {

namespace {

struct Test {
  const char* name;
  void (*body)();
};

// Inside a function, because tests of other files are added before this file's own variables would exist.
std::vector<Test>& all_tests() {
  static std::vector<Test> tests;
  return tests;
}

std::atomic<int64_t> checks{0};
std::atomic<int64_t> failures{0};
thread_local std::string context;

std::string printed(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

} // namespace

bool add_test(const char* name, void (*body)()) {
  all_tests().push_back({name, body});
  return true;
}

Context::Context(const std::string& text) : before_(context) {
  context += (before_.empty() ? "" : ", ") + text;
}

Context::~Context() {
  context = before_;
}

std::string text_of(double value) {
  return printed("%.17g", value);
}

std::string text_of(float value) {
  return printed("%.9g", static_cast<double>(value));
}

std::string text_of(int64_t value) {
  return std::to_string(value);
}

std::string text_of(const void* value) {
  char text[64];
  std::snprintf(text, sizeof text, "%p", value);
  return text;
}

void count_check() {
  checks.fetch_add(1, std::memory_order_relaxed);
}

void report(const char* file, int line, const std::string& message) {
  // A wrong loop fails for every element; the first failures say it all.
  constexpr int64_t kPrinted = 20;
  if (failures.fetch_add(1, std::memory_order_relaxed) < kPrinted) {
    const std::string where = context.empty() ? "" : " [" + context + "]";
    std::fprintf(stderr, "%s:%d: %s%s\n", file, line, message.c_str(), where.c_str());
  }
}

void check(bool holds, const char* text, const char* file, int line) {
  count_check();
  if (!holds) {
    report(file, line, std::string(text) + " does not hold");
  }
}

void check_near(double value, double expected, double tolerance, const char* text, const char* file, int line) {
  count_check();
  const bool is_near = std::isfinite(expected) ? std::abs(value - expected) <= tolerance
      : std::isnan(expected)                   ? std::isnan(value)
                                               : value == expected;
  if (!is_near) {
    report(
        file,
        line,
        std::string(text) + " is " + text_of(value) + ", expected " + text_of(expected) + " within " +
            text_of(tolerance));
  }
}

} // namespace torch_odt::tests

int main(int count, char** arguments) {
  using namespace torch_odt::tests;
  int64_t run = 0;
  for (const Test& test : all_tests()) {
    if (count > 1 && std::strstr(test.name, arguments[1]) == nullptr) {
      continue;
    }
    ++run;
    const int64_t before = failures;
    try {
      test.body();
    } catch (const std::exception& error) {
      report(__FILE__, __LINE__, std::string(test.name) + " threw: " + error.what());
    }
    if (failures != before) {
      std::fprintf(stderr, "FAILED: %s\n", test.name);
    }
  }
  std::printf(
      "%lld tests, %lld checks, %lld failures\n",
      static_cast<long long>(run),
      static_cast<long long>(checks),
      static_cast<long long>(failures));
  return run > 0 && failures == 0 ? 0 : 1;
}
