#!/bin/sh
# Make the secrets of a fleet: a token and certificates for the row servers, and a certificate for the proxy.
#
#   sh deploy/make-secrets.sh FOLDER NAME...
#   sh deploy/make-secrets.sh secrets rows-0.rows rows-1.rows rows-2.rows rows-3.rows
#
# The names are those by which tower servers reach the row servers (cluster.toml). Run it again with more names, and the
# row servers' certificate is made anew; the token and the certificate authority stay as they are.
#
#   FOLDER/rows/      what row servers and tower servers mount: token, ca.crt, tls.crt, tls.key
#   FOLDER/public/    what the proxy mounts: tls.crt, tls.key; made for localhost, replace both by those of your domain
#   FOLDER/ca.key     the authority's key; keep it, but mount it nowhere
set -eu
[ $# -ge 2 ] || { echo "usage: sh make-secrets.sh FOLDER NAME..., with the names of the row servers" >&2; exit 2; }
folder=$1
shift
umask 077
mkdir -p "$folder/rows" "$folder/public"
cd "$folder"

[ -f rows/token ] || openssl rand -hex 32 >rows/token
if [ ! -f ca.key ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=HotRow row servers" \
    -keyout ca.key -out rows/ca.crt 2>/dev/null
fi

names=
for name in "$@"; do names="$names,DNS:$name"; done
printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth\n' "${names#,}" >extensions
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$1" -keyout rows/tls.key -out request 2>/dev/null
openssl x509 -req -in request -CA rows/ca.crt -CAkey ca.key -set_serial "0x$(openssl rand -hex 8)" -days 365 \
  -extfile extensions -out rows/tls.crt 2>/dev/null
rm request extensions

[ -f public/tls.key ] || openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 -subj /CN=localhost \
  -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout public/tls.key -out public/tls.crt 2>/dev/null
echo "the secrets are in $folder; only you can read them"
