#include "backing_file.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace torch_odt::memory {

namespace {

// Without a name from the start where the system can do that.
int open_nameless(const std::string& folder) {
#if defined(O_TMPFILE)
  const int nameless = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (nameless >= 0) {
    return nameless;
  }
#endif
  std::string path = folder + "/torch_odt-pages-XXXXXX";
#if defined(__linux__)
  const int named = mkostemp(path.data(), O_CLOEXEC);
#else
  const int named = mkstemp(path.data());
#endif
  if (named >= 0) {
    unlink(path.c_str());
  }
  return named;
}

// Whether the file goes past the system's cache from now on.
bool make_direct(int descriptor) {
#if defined(O_DIRECT)
  const int flags = fcntl(descriptor, F_GETFL);
  if (flags < 0 || fcntl(descriptor, F_SETFL, flags | O_DIRECT) != 0) {
    return false;
  }
  // Some file systems take the flag and refuse the transfer.
  alignas(kBlockBytes) char block[kBlockBytes] = {};
  if (pwrite(descriptor, block, kBlockBytes, 0) == kBlockBytes) {
    return true;
  }
  fcntl(descriptor, F_SETFL, flags);
  return false;
#elif defined(F_NOCACHE)
  return fcntl(descriptor, F_NOCACHE, 1) == 0;
#else
  return descriptor < 0;
#endif
}

} // namespace

BackingFile::BackingFile(const std::string& folder) : descriptor_(open_nameless(folder)) {
  if (descriptor_ < 0) {
    throw std::runtime_error("cannot make a file for paging in " + folder + ": " + std::strerror(errno));
  }
  is_direct_ = make_direct(descriptor_);
}

BackingFile::~BackingFile() {
  close(descriptor_);
}

int BackingFile::write(const char* data, int64_t bytes, int64_t offset) {
  const int64_t first = offset;
  while (bytes > 0) {
    const ssize_t done = pwrite(descriptor_, data, static_cast<size_t>(bytes), offset);
    if (done < 0 && errno == EINTR) {
      continue;
    }
    if (done <= 0) {
      return done == 0 ? ENOSPC : errno;
    }
    if (done < bytes && done % kBlockBytes != 0) {
      // The rest of a block had no room.
      return ENOSPC;
    }
    data += done;
    bytes -= done;
    offset += done;
  }
  drop_cached(first, offset - first);
  return 0;
}

int BackingFile::read(char* data, int64_t bytes, int64_t offset) {
  const int64_t first = offset;
  while (bytes > 0) {
    const ssize_t done = pread(descriptor_, data, static_cast<size_t>(bytes), offset);
    if (done < 0 && errno == EINTR) {
      continue;
    }
    if (done <= 0) {
      return done == 0 ? kEndOfData : errno;
    }
    data += done;
    bytes -= done;
    offset += done;
  }
  drop_cached(first, offset - first);
  return 0;
}

int BackingFile::reserve(int64_t bytes) {
  struct stat found = {};
  if (fstat(descriptor_, &found) != 0) {
    return errno;
  }
  if (found.st_size < bytes) {
#if defined(__linux__)
    while (fallocate(descriptor_, 0, 0, bytes) != 0) {
      if (errno == EOPNOTSUPP || errno == ENOSYS) {
        break;
      }
      if (errno != EINTR) {
        return errno;
      }
    }
#endif
    if (ftruncate(descriptor_, bytes) != 0) {
      return errno;
    }
  }
  return 0;
}

void BackingFile::drop_cached(int64_t offset, int64_t bytes) const {
#if defined(__linux__)
  if (!is_direct_) {
    sync_file_range(
        descriptor_,
        offset,
        bytes,
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    posix_fadvise(descriptor_, offset, bytes, POSIX_FADV_DONTNEED);
  }
#else
  static_cast<void>(offset);
  static_cast<void>(bytes);
#endif
}

} // namespace torch_odt::memory
