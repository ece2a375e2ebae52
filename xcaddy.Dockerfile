# Caddy with the agent guard, built from this directory:
#
#   docker build -f xcaddy.Dockerfile --build-arg VERSION=$(git describe --tags --always) -t caddy-agent-guard .
#   docker run -p 8080:8080 -v agent_guard:/data --read-only --tmpfs /tmp --tmpfs /config:uid=1000 caddy-agent-guard
#
# The base images are pinned by digest (the tag beside it is for people): a tag can be
# moved, a digest cannot. Renovate and Dependabot keep both up to date.

FROM golang:1.26.8-alpine@sha256:ce864e7223ac17b1775e6fd0b4c0db580c2eb50e7953a427916379e4b92a1628 AS builder
# go.mod requires the same version; .ci/run compares them, and that of xcaddy too.
ARG CADDY_VERSION=2.11.9
ENV GOTOOLCHAIN=local CGO_ENABLED=0
RUN go install github.com/caddyserver/xcaddy/cmd/xcaddy@v0.4.7
COPY . /src
# The version is that of `agent_guard_info`; Go knows none of a directory.
ARG VERSION=
# The other flags are those that xcaddy gives by itself.
ENV XCADDY_GO_BUILD_FLAGS="-ldflags '-w -s -X github.com/agent-guard/caddy-agent-guard/caddymodule.built=${VERSION}' -trimpath -tags nobadger,nomysql,nopgx"
RUN xcaddy build "v${CADDY_VERSION}" \
	--with github.com/agent-guard/caddy-agent-guard=/src \
	--output /usr/bin/caddy

FROM alpine:3.24@sha256:28bd5fe8b56d1bd048e5babf5b10710ebe0bae67db86916198a6eec434943f8b
RUN apk add --no-cache ca-certificates mailcap \
	&& adduser -D -H -u 1000 -s /sbin/nologin caddy \
	&& mkdir -p /etc/caddy /data/caddy /config/caddy \
	&& chown -R caddy:caddy /data /config \
	&& chmod 0700 /data/caddy
COPY --from=builder /usr/bin/caddy /usr/bin/caddy
COPY Caddyfile.example /etc/caddy/Caddyfile

# Caddy's data, and with it the records and the key that opens them, are in /data:
# nobody but this user reads them. The id is fixed, so that a volume keeps its owner
# over new images.
ENV XDG_DATA_HOME=/data XDG_CONFIG_HOME=/config EXAMPLE_DIR=/data/example
USER 1000:1000

# Losing /data is losing every record: a retry would run again. An anonymous volume
# at least outlives the container; name one in earnest. Nothing else needs to be
# writable, but /tmp for bodies that do not fit into memory.
VOLUME /data

EXPOSE 8080
# The gateway's own page says whether it takes guarded calls: 503 where the store is
# closed. It needs no admin API. Another configuration sets HEALTH_URL to a site with
# an agent_guard.
ENV HEALTH_URL=http://localhost:8080/.well-known/cascade/health
HEALTHCHECK --interval=10s --timeout=3s --start-period=15s --retries=3 \
	CMD wget -q -O /dev/null "$HEALTH_URL"

# Docker sends SIGTERM and then waits 10 s before it kills. Running executions get
# `drain` (30 s) to end; stop with `docker stop -t 40`, or they are in doubt.
CMD ["caddy", "run", "--config", "/etc/caddy/Caddyfile", "--adapter", "caddyfile"]
