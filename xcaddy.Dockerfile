# Caddy with the agent guard, built from this directory:
#
#   docker build -f xcaddy.Dockerfile -t caddy-agent-guard .
#   docker run -p 8080:8080 -v agent_guard:/data caddy-agent-guard
#
# A released version instead of this directory: replace the --with line by
# `--with github.com/agent-guard/caddy-agent-guard@VERSION` and drop the COPY.

# One version for both stages: the binary must not be newer or older than the files
# around it. go.mod requires the same one; .ci/run compares them.
ARG CADDY_VERSION=2.11.9

FROM caddy:${CADDY_VERSION}-builder AS builder
ARG CADDY_VERSION
# The builder image would give the binary the file capability cap_net_bind_service.
# A binary with it cannot even be started where that capability is dropped
# (--cap-drop ALL, Kubernetes' restricted profile), and nobody needs it here: Docker
# lets everyone bind low ports inside a container, and the example uses 8080.
ENV XCADDY_SETCAP=0
COPY . /src
RUN xcaddy build "v${CADDY_VERSION}" \
	--with github.com/agent-guard/caddy-agent-guard=/src \
	--output /usr/bin/caddy

FROM caddy:${CADDY_VERSION}
COPY --from=builder /usr/bin/caddy /usr/bin/caddy
COPY Caddyfile.example /etc/caddy/Caddyfile

# The records and the key that opens them are in /data: nobody but this user reads
# them. The id is fixed, so that a volume keeps its owner over new images.
RUN adduser -D -H -u 1000 -s /sbin/nologin caddy \
	&& mkdir -p /data/caddy /config/caddy \
	&& chown -R caddy:caddy /data /config \
	&& chmod 0700 /data/caddy
USER 1000:1000

# Losing /data is losing every record: a retry would run again. An anonymous volume
# at least outlives the container; name one in earnest.
VOLUME /data

EXPOSE 8080
# Caddy's admin API answers on localhost only, so the check runs inside. /config/admin
# is small and answers as soon as a configuration has been loaded.
HEALTHCHECK --interval=10s --timeout=3s --start-period=15s --retries=3 \
	CMD ["wget", "-q", "-O", "/dev/null", "http://127.0.0.1:2019/config/admin"]

# Docker sends SIGTERM and then waits 10 s before it kills. Running executions get
# `drain` (30 s) to end; stop with `docker stop -t 40`, or they are in doubt.
CMD ["caddy", "run", "--config", "/etc/caddy/Caddyfile", "--adapter", "caddyfile"]
