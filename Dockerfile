# dpserve alone: one static program, the certificates of public CAs, and two folders that its user may write.
# Engines other than the simulated one need an image of theirs: examples/kubernetes/Dockerfile.vllm.
FROM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN CGO_ENABLED=0 go build -trimpath -tags=nomsgpack -ldflags="-s -w" -o /image/dpserve ./cmd/dpserve
RUN mkdir -p /image/tmp /image/var/lib/dpserve && chmod 700 /image/var/lib/dpserve

FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build --chown=10001:10001 /image/ /
USER 10001:10001
ENV HOME=/tmp XDG_STATE_HOME=/var/lib/dpserve
EXPOSE 8000 8265
HEALTHCHECK NONE
ENTRYPOINT ["/dpserve"]
