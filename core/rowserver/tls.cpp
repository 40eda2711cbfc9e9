#include "rowserver/tls.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <stdexcept>

namespace hotrow {
namespace {

// The functions of OpenSSL that are used, and its constants, which are the same in 1.1 and 3.
struct OpenSsl {
  void* (*tls_server_method)();
  void* (*tls_client_method)();
  void* (*ctx_new)(void* method);
  void (*ctx_free)(void* context);
  int (*ctx_use_chain)(void* context, const char* file);
  int (*ctx_use_key)(void* context, const char* file, int type);
  int (*ctx_check_key)(void* context);
  int (*ctx_load_verify)(void* context, const char* file, const char* folder);
  void (*ctx_set_verify)(void* context, int mode, void* callback);
  long (*ctx_ctrl)(void* context, int command, long number, void* pointer);
  void* (*ssl_new)(void* context);
  void (*ssl_free)(void* stream);
  int (*set_fd)(void* stream, int descriptor);
  void (*set_accept_state)(void* stream);
  void (*set_connect_state)(void* stream);
  int (*do_handshake)(void* stream);
  int (*read)(void* stream, void* out, int bytes);
  int (*write)(void* stream, const void* data, int bytes);
  int (*get_error)(const void* stream, int result);
  int (*pending)(const void* stream);
  long (*ssl_ctrl)(void* stream, int command, long number, void* pointer);
  int (*set1_host)(void* stream, const char* host);
  void* (*get0_param)(void* stream);
  int (*param_set_ip)(void* param, const char* ip);
  long (*verify_result)(const void* stream);
  const char* (*verify_text)(long result);
  unsigned long (*err_get)();
  void (*err_text)(unsigned long error, char* out, size_t bytes);
  void (*err_clear)();

  static constexpr int kPem = 1, kVerifyPeer = 1;
  static constexpr int kMinimumVersion = 123, kTls12 = 0x0303, kMode = 33, kPartialMovingWrites = 1 | 2,
                       kServerName = 55;
  static constexpr int kWantRead = 2, kWantWrite = 3, kZeroReturn = 6;
};

template <class Function>
void load(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) throw std::runtime_error(std::string("TLS: the system's OpenSSL lacks ") + name);
}

const OpenSsl& open_ssl() {
  static const OpenSsl loaded = [] {
    void *ssl = nullptr, *crypto = nullptr;
    for (const char* version : {".3", ".1.1"}) {
      ssl = dlopen((std::string("libssl.so") + version).c_str(), RTLD_NOW);
      crypto = dlopen((std::string("libcrypto.so") + version).c_str(), RTLD_NOW);
      if (ssl && crypto) break;
    }
    if (!ssl || !crypto)
      throw std::runtime_error("TLS needs OpenSSL 1.1 or 3 on this machine: apt-get install libssl3, for example");
    OpenSsl o{};
    load(ssl, "TLS_server_method", o.tls_server_method);
    load(ssl, "TLS_client_method", o.tls_client_method);
    load(ssl, "SSL_CTX_new", o.ctx_new);
    load(ssl, "SSL_CTX_free", o.ctx_free);
    load(ssl, "SSL_CTX_use_certificate_chain_file", o.ctx_use_chain);
    load(ssl, "SSL_CTX_use_PrivateKey_file", o.ctx_use_key);
    load(ssl, "SSL_CTX_check_private_key", o.ctx_check_key);
    load(ssl, "SSL_CTX_load_verify_locations", o.ctx_load_verify);
    load(ssl, "SSL_CTX_set_verify", o.ctx_set_verify);
    load(ssl, "SSL_CTX_ctrl", o.ctx_ctrl);
    load(ssl, "SSL_new", o.ssl_new);
    load(ssl, "SSL_free", o.ssl_free);
    load(ssl, "SSL_set_fd", o.set_fd);
    load(ssl, "SSL_set_accept_state", o.set_accept_state);
    load(ssl, "SSL_set_connect_state", o.set_connect_state);
    load(ssl, "SSL_do_handshake", o.do_handshake);
    load(ssl, "SSL_read", o.read);
    load(ssl, "SSL_write", o.write);
    load(ssl, "SSL_get_error", o.get_error);
    load(ssl, "SSL_pending", o.pending);
    load(ssl, "SSL_ctrl", o.ssl_ctrl);
    load(ssl, "SSL_set1_host", o.set1_host);
    load(ssl, "SSL_get0_param", o.get0_param);
    load(ssl, "SSL_get_verify_result", o.verify_result);
    load(crypto, "X509_VERIFY_PARAM_set1_ip_asc", o.param_set_ip);
    load(crypto, "X509_verify_cert_error_string", o.verify_text);
    load(crypto, "ERR_get_error", o.err_get);
    load(crypto, "ERR_error_string_n", o.err_text);
    load(crypto, "ERR_clear_error", o.err_clear);
    return o;
  }();
  return loaded;
}

std::string last_error() {
  const OpenSsl& o = open_ssl();
  const unsigned long error = o.err_get();
  if (!error) return "the peer closed the connection";
  char text[256];
  o.err_text(error, text, sizeof(text));
  o.err_clear();
  return text;
}

bool is_ip(const std::string& host) {
  unsigned char address[16];
  return inet_pton(AF_INET, host.c_str(), address) == 1 || inet_pton(AF_INET6, host.c_str(), address) == 1;
}

}  // namespace

TlsContext::TlsContext(bool is_server) : is_server_(is_server) {
  const OpenSsl& o = open_ssl();
  context_ = o.ctx_new(is_server ? o.tls_server_method() : o.tls_client_method());
  if (!context_) throw std::runtime_error("TLS: " + last_error());
  o.ctx_ctrl(context_, OpenSsl::kMinimumVersion, OpenSsl::kTls12, nullptr);
  o.ctx_ctrl(context_, OpenSsl::kMode, OpenSsl::kPartialMovingWrites, nullptr);
}

TlsContext::~TlsContext() {
  if (context_) open_ssl().ctx_free(context_);
}

std::shared_ptr<TlsContext> TlsContext::for_server(const std::string& certificate, const std::string& key) {
  const std::shared_ptr<TlsContext> made(new TlsContext(true));
  const OpenSsl& o = open_ssl();
  if (o.ctx_use_chain(made->context_, certificate.c_str()) != 1)
    throw std::runtime_error("the certificate " + certificate + " cannot be used: " + last_error());
  if (o.ctx_use_key(made->context_, key.c_str(), OpenSsl::kPem) != 1)
    throw std::runtime_error("the key " + key + " cannot be used: " + last_error());
  if (o.ctx_check_key(made->context_) != 1)
    throw std::runtime_error("the key " + key + " is not that of the certificate " + certificate);
  return made;
}

std::shared_ptr<TlsContext> TlsContext::for_client(const std::string& authorities) {
  const std::shared_ptr<TlsContext> made(new TlsContext(false));
  const OpenSsl& o = open_ssl();
  if (o.ctx_load_verify(made->context_, authorities.c_str(), nullptr) != 1)
    throw std::runtime_error("the certificate authorities in " + authorities + " cannot be used: " + last_error());
  o.ctx_set_verify(made->context_, OpenSsl::kVerifyPeer, nullptr);
  return made;
}

TlsStream::TlsStream(std::shared_ptr<TlsContext> context, int descriptor, const std::string& host)
    : context_(std::move(context)) {
  const OpenSsl& o = open_ssl();
  stream_ = o.ssl_new(context_->context_);
  if (!stream_ || o.set_fd(stream_, descriptor) != 1) throw std::runtime_error("TLS: " + last_error());
  if (context_->is_server_) {
    o.set_accept_state(stream_);
    return;
  }
  o.set_connect_state(stream_);
  if (is_ip(host)) {
    o.param_set_ip(o.get0_param(stream_), host.c_str());
  } else {
    o.set1_host(stream_, host.c_str());
    o.ssl_ctrl(stream_, OpenSsl::kServerName, 0, const_cast<char*>(host.c_str()));
  }
}

TlsStream::~TlsStream() {
  if (stream_) open_ssl().ssl_free(stream_);
}

TlsStream::Handshake TlsStream::handshake() {
  const OpenSsl& o = open_ssl();
  o.err_clear();
  const int result = o.do_handshake(stream_);
  if (result == 1) return Handshake::kDone;
  const int error = o.get_error(stream_, result);
  wants_write_ = error == OpenSsl::kWantWrite;
  if (wants_write_ || error == OpenSsl::kWantRead) return Handshake::kWaits;
  const long verified = o.verify_result(stream_);
  error_ = verified ? std::string("the server's certificate is refused: ") + o.verify_text(verified) : last_error();
  return Handshake::kFailed;
}

ssize_t TlsStream::failed(int result) {
  const int error = open_ssl().get_error(stream_, result);
  wants_write_ = error == OpenSsl::kWantWrite;
  if (wants_write_ || error == OpenSsl::kWantRead) {
    errno = EAGAIN;
    return -1;
  }
  open_ssl().err_clear();
  if (error == OpenSsl::kZeroReturn) return 0;
  errno = EPROTO;
  return -1;
}

ssize_t TlsStream::receive(char* out, size_t bytes) {
  const int got = open_ssl().read(stream_, out, static_cast<int>(std::min<size_t>(bytes, INT_MAX)));
  return got > 0 ? got : failed(got);
}

ssize_t TlsStream::send(const char* data, size_t bytes) {
  const int sent = open_ssl().write(stream_, data, static_cast<int>(std::min<size_t>(bytes, INT_MAX)));
  return sent > 0 ? sent : failed(sent);
}

ssize_t TlsStream::send(const iovec* parts, int count) {
  ssize_t sent = 0;
  for (int i = 0; i < count; ++i) {
    const ssize_t some = send(static_cast<const char*>(parts[i].iov_base), parts[i].iov_len);
    if (some <= 0) return sent > 0 ? sent : some;
    sent += some;
    if (static_cast<size_t>(some) < parts[i].iov_len) break;
  }
  return sent;
}

ssize_t receive_from(int socket, TlsStream* tls, char* out, size_t bytes) {
  return tls ? tls->receive(out, bytes) : recv(socket, out, bytes, 0);
}

ssize_t send_to(int socket, TlsStream* tls, iovec* parts, int count) {
  if (tls) return tls->send(parts, count);
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = static_cast<size_t>(count);
  return sendmsg(socket, &message, MSG_NOSIGNAL);
}

bool TlsStream::has_pending() const { return open_ssl().pending(stream_) > 0; }

}  // namespace hotrow
