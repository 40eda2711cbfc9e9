// A fresh folder for one test, under $TMPDIR or /tmp, removed with all that is in it.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>

namespace hotrow::testing {

class TempFolder {
 public:
  TempFolder() : TempFolder(parent()) {}
  explicit TempFolder(const std::string& parent) : path_(parent + "/hotrow.XXXXXX") {
    if (!::mkdtemp(path_.data())) throw std::runtime_error("cannot make a folder in '" + parent + "'; set TMPDIR");
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  static std::string parent() {
    const char* chosen = std::getenv("TMPDIR");
    return chosen && *chosen ? chosen : "/tmp";
  }

  std::string path_;
};

}  // namespace hotrow::testing
