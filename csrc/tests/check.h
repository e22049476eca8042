// What the tests are written with: a check that fails prints its place and both values, and the test goes on.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <type_traits>

namespace torch_odt::tests {

// Returns true, so that it can run before main().
bool add_test(const char* name, void (*body)());

// Says in every failure below it which of many cases failed.
class Context {
 public:
  explicit Context(const std::string& text);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

 private:
  std::string before_;
};

std::string text_of(double value);
std::string text_of(float value);
std::string text_of(int64_t value);
std::string text_of(const void* value);
template <typename T>
  requires(std::integral<T> || std::is_enum_v<T>)
std::string text_of(T value) {
  return text_of(static_cast<int64_t>(value));
}

// Threads of a test may check too.
void count_check();
void report(const char* file, int line, const std::string& message);

void check(bool holds, const char* text, const char* file, int line);
// Infinities and NaNs are near to their own kind alone.
void check_near(double value, double expected, double tolerance, const char* text, const char* file, int line);

template <typename Value, typename Expected>
void check_equal(const Value& value, const Expected& expected, const char* text, const char* file, int line) {
  count_check();
  if (!(value == expected)) {
    report(file, line, std::string(text) + " is " + text_of(value) + ", expected " + text_of(expected));
  }
}

template <typename Exception, typename Function>
void check_throws(const Function& function, const char* text, const char* file, int line) {
  count_check();
  try {
    function();
  } catch (const Exception&) {
    return;
  } catch (...) {
    report(file, line, std::string(text) + " threw something else");
    return;
  }
  report(file, line, std::string(text) + " threw nothing");
}

} // namespace torch_odt::tests

#define TEST(name)                                                                            \
  static void name();                                                                         \
  [[maybe_unused]] static const bool name##_added = torch_odt::tests::add_test(#name, &name); \
  static void name()

#define CHECK(condition) torch_odt::tests::check((condition), #condition, __FILE__, __LINE__)
#define CHECK_EQUAL(value, expected) torch_odt::tests::check_equal((value), (expected), #value, __FILE__, __LINE__)
#define CHECK_NEAR(value, expected, tolerance) \
  torch_odt::tests::check_near((value), (expected), (tolerance), #value, __FILE__, __LINE__)
#define CHECK_THROWS(exception, expression) \
  torch_odt::tests::check_throws<exception>([&] { expression; }, #expression, __FILE__, __LINE__)
