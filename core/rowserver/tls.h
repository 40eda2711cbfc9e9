// TLS over a connected socket, by the system's OpenSSL (libssl 1.1 or 3), which is loaded when it is first used. So the
// core links no TLS library, and one without OpenSSL works as long as nobody asks for TLS.
//
// The server has a certificate; a client checks it against certificate authorities and the host's name or IP address.
// Clients prove themselves by the token (docs/formats/rows-protocol.md), inside the TLS session.
//
// Threads: a context is shared by any number of streams; one thread at a time uses a stream.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <memory>
#include <string>

namespace hotrow {

class TlsContext {
 public:
  // Files are PEM. Throws std::runtime_error that says which file is wrong and why.
  static std::shared_ptr<TlsContext> for_server(const std::string& certificate, const std::string& key);
  static std::shared_ptr<TlsContext> for_client(const std::string& authorities);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

 private:
  friend class TlsStream;
  explicit TlsContext(bool is_server);
  void* context_ = nullptr;
  const bool is_server_;
};

class TlsStream {
 public:
  // `descriptor` stays the caller's. `host` is what a client's certificate must name; a server passes "".
  TlsStream(std::shared_ptr<TlsContext> context, int descriptor, const std::string& host);
  ~TlsStream();
  TlsStream(const TlsStream&) = delete;
  TlsStream& operator=(const TlsStream&) = delete;

  enum class Handshake { kDone, kWaits, kFailed };
  Handshake handshake();
  // As recv() and send(): bytes, 0 at the end, or -1 with errno, which is EAGAIN when the socket must be polled.
  ssize_t receive(char* out, size_t bytes);
  ssize_t send(const char* data, size_t bytes);
  // As sendmsg(): sends the parts, or the beginning of them. The first one is not empty.
  ssize_t send(const iovec* parts, int count);
  // Whether the last call that returned EAGAIN waits for the socket to take bytes.
  bool wants_write() const { return wants_write_; }
  // Whether bytes were decrypted and not received yet. Polling the socket does not tell of them.
  bool has_pending() const;
  // Why the handshake failed.
  const std::string& error() const { return error_; }

 private:
  ssize_t failed(int result);
  const std::shared_ptr<TlsContext> context_;
  void* stream_ = nullptr;
  bool wants_write_ = false;
  std::string error_;
};

// recv() and sendmsg() on a socket, through `tls` unless it is null.
ssize_t receive_from(int socket, TlsStream* tls, char* out, size_t bytes);
ssize_t send_to(int socket, TlsStream* tls, iovec* parts, int count);

}  // namespace hotrow
