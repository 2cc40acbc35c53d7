#!/bin/sh
# Renders the templates for the container: the nginx image runs this before nginx, as /docker-entrypoint.d/90-latentmill.sh.
# It needs no more than a shell and awk, and no right that the user nginx does not have.
#
#   API_SERVERS    host:port of each api with nginx' parameters weight=N, max_conns=N or backup, comma separated
#   S3_SERVER      host:port of the object store
#   S3_BUCKET      bucket of the videos
#   LISTEN         port or address:port
#   EDGE_SECRET_FILE         file with the secret of the media addresses; /run/credentials/edge_secret
#   CONNECTIONS_PER_ADDRESS  requests, streams and sockets of one address at a time; see below
#   SUBMIT_RATE, SUBMIT_BURST  submits of one address
#   CACHE_SIZE     of the videos on disk
#   TRUSTED_PROXIES  networks (CIDR, comma separated) of load balancers whose X-Forwarded-For is believed; none
#   TLS_PORT       where HTTPS is served, with /run/tls/certificate.pem and /run/tls/key.pem; not served when empty
#   RESOLVER       address of the name server; those of /etc/resolv.conf
set -eu
# The secret is in what is written.
umask 077

fail() {
    echo "latentmill nginx: $*" >&2
    exit 1
}

value_of() {
    eval "printf '%s' \"\${$1:-}\""
}

must_match() {
    value_of "$1" | tr '\n' ' ' | grep -Eqx -- "$2" || fail "$1 is '$(value_of "$1")': it must be $3"
}

default() {
    [ -n "$(value_of "$1")" ] || eval "$1=\$2"
    export "${1?}"
}

# Lines of an upstream: server_lines NAME PARAMETERS
server_lines() {
    value_of "$1" | awk -v RS=, -v name="$1" -v parameters="$2" '
        function refuse(what) {
            printf "latentmill nginx: %s holds \"%s\": it must be host:port, each with weight=N, max_conns=N or backup " \
                "behind it, comma separated\n", name, what | "cat >&2"
            refused = 1
            exit 1
        }
        { gsub(/^[ \t\n]+|[ \t\n]+$/, "") }
        $1 !~ /^[A-Za-z0-9._-]+:[0-9]+$/ { refuse($0) }
        {
            for (i = 2; i <= NF; i++) if ($i !~ /^(weight=[0-9]+|max_conns=[0-9]+|backup)$/) refuse($i)
            print "server " $0 " " parameters ";"
        }
        END { if (!refused && NR == 0) refuse("") }'
}

# nginx takes `resolve` since 1.27.3: it then asks for the names anew and finds replicas that came later.
resolves_names() {
    nginx -v 2>&1 | awk -F '[/. ]' '/^nginx version: nginx\// {
        known = 1
        exit !(($4 * 1000 + $5) * 1000 + $6 >= 1027003)
    } END { if (!known) exit 1 }'
}

name_servers() {
    awk '$1 == "nameserver" { print index($2, ":") ? "[" $2 "]" : $2 }' /etc/resolv.conf | paste -sd ' ' -
}

render() {
    awk '{
        done = ""
        while (match($0, /[$][{][A-Z][A-Z0-9_]*[}]/)) {
            name = substr($0, RSTART + 2, RLENGTH - 3)
            if (!(name in ENVIRON)) {
                print "latentmill nginx: " FILENAME " needs " name ", which has no value" | "cat >&2"
                exit 1
            }
            done = done substr($0, 1, RSTART - 1) ENVIRON[name]
            $0 = substr($0, RSTART + RLENGTH)
        }
        print done $0
    }' "$TEMPLATES/$1.template" >"$CONFIG_DIR/$1"
}

default TEMPLATES /etc/latentmill/nginx
default CONFIG_DIR /run/latentmill
default RUN_DIR /run/latentmill
default CACHE_DIR /var/cache/latentmill
default EDGE_SECRET_FILE /run/credentials/edge_secret
default ACCESS_LOG /dev/stdout
default LISTEN 8080
default S3_BUCKET latentmill
default CACHE_SIZE 2g
default WORKER_PROCESSES 2
# A published port can hide its clients behind the gateway's address, so these are limits for all of them together: as many
# sockets as one api serves, and bursts of thousands of submits. Where clients keep their addresses, set lower ones.
default CONNECTIONS_PER_ADDRESS 5000
default SUBMIT_RATE 2000r/s
default SUBMIT_BURST 4000

must_match LISTEN '([0-9.]+:)?[0-9]{1,5}' 'a port or an IPv4 address and a port, such as 8080'
must_match S3_BUCKET '[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]' 'the name of a bucket'
must_match S3_SERVER '[A-Za-z0-9._-]+:[0-9]+' 'host:port'
must_match CACHE_SIZE '[0-9]+[kmg]' 'a size such as 2g'
must_match SUBMIT_RATE '[1-9][0-9]*r/[sm]' 'a rate such as 2000r/s'
for name in CONNECTIONS_PER_ADDRESS SUBMIT_BURST WORKER_PROCESSES; do
    must_match "$name" '[1-9][0-9]{0,5}' 'a whole number from 1 to 999999'
done
for folder in "$CONFIG_DIR" "$RUN_DIR" "$CACHE_DIR"; do
    [ -w "$folder" ] || fail "$folder is not writable for $(id -un): it must be a mounted tmpfs or volume"
done
[ -r "$EDGE_SECRET_FILE" ] || fail "the file $EDGE_SECRET_FILE is not there or not readable for $(id -un)"

EDGE_SECRET=$(cat "$EDGE_SECRET_FILE")
# What nginx would take for its own syntax is refused, and never shown.
value_of EDGE_SECRET | tr '\n' ' ' | grep -Eqx '[A-Za-z0-9._~+/=-]{16,}' \
    || fail "the file $EDGE_SECRET_FILE must hold one line of at least 16 letters, digits or any of ._~+/=-"
export EDGE_SECRET

open_files=$(ulimit -Hn)
[ "$open_files" != unlimited ] && [ "$open_files" -lt 65536 ] || open_files=65536
export OPEN_FILES="$open_files"
# Each connection of a client may hold one to an api as well, and cached files are open too.
export WORKER_CONNECTIONS="$((open_files / 2))"
export SUBMITS_PER_ADDRESS="$((CONNECTIONS_PER_ADDRESS + 1000))"

RESOLVE=''
if resolves_names; then
    RESOLVE=' resolve'
    default RESOLVER "$(name_servers)"
    [ -n "$RESOLVER" ] || fail 'RESOLVER is not set and /etc/resolv.conf names no name server'
    # Docker and Kubernetes give a new container its name at once; search domains of resolv.conf are not used.
    RESOLVER="resolver $RESOLVER valid=5s ipv6=off;"
else
    RESOLVER=''
fi
# Each attempt at a container that vanished costs a second, hence fewer of them than at a process that refuses.
API_LINES=$(server_lines API_SERVERS "max_fails=2 fail_timeout=10s$RESOLVE")
# With a single server, marking it as failed would only turn a hiccup into an outage.
S3_LINES=$(server_lines S3_SERVER "max_fails=0$RESOLVE")
export RESOLVER API_LINES S3_LINES

TRUSTED_LINES=''
if [ -n "${TRUSTED_PROXIES:-}" ]; then
    must_match TRUSTED_PROXIES '[0-9a-fA-F.:/, ]+' 'networks such as 10.0.0.0/8, comma separated'
    TRUSTED_LINES=$(echo "$TRUSTED_PROXIES" | tr -s ', ' '\n\n' | sed '/./!d; s/.*/set_real_ip_from &;/'
        echo 'real_ip_header X-Forwarded-For;'
        echo 'real_ip_recursive on;')
fi
TLS_LINE=''
if [ -n "${TLS_PORT:-}" ]; then
    must_match TLS_PORT '[1-9][0-9]{0,4}' 'a port such as 8443'
    default TLS_DIR /run/tls
    for file in "$TLS_DIR/certificate.pem" "$TLS_DIR/key.pem"; do
        [ -r "$file" ] || fail "TLS_PORT is set, but the file $file is not there or not readable for $(id -un)"
    done
    render tls.conf
    TLS_LINE="include $CONFIG_DIR/tls.conf;"
fi
export TRUSTED_LINES TLS_LINE

for name in nginx.conf upstreams.conf front.conf edge.conf; do
    render "$name"
done
