# The image of the agent: the program, the C library, nothing else. There is no shell and no package manager, and the
# root file system can be mounted read-only.
#
# It cannot be a static program: NVIDIA's library comes with the node's driver and is opened at run time (cgo, dlopen),
# and it brings the C library's other parts (libm, libdl, librt, libpthread) into the process.
#
# By its digest, which is of all platforms. For another one: docker buildx imagetools inspect golang:TAG --format '{{.Manifest.Digest}}'
ARG BUILD_IMAGE=golang:1.26.8-bookworm@sha256:a688600ca24f8a4d3ca77f95b0dd40704a9fc787c826660eb7ba0b641b8b175d

FROM ${BUILD_IMAGE} AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=unknown
# netgo and osusergo: names and users are looked up by Go, which needs no C library plug-ins in the image.
# grpcnotrace: without gRPC's tracing the linker leaves out what is never called, a third of the program.
# -z lazy: the symbols of NVIDIA's library are still unknown when the program starts.
# relro and pie: what need not be written is read-only, and where things lie cannot be guessed.
RUN CGO_ENABLED=1 CGO_CFLAGS="-O2 -g -Wno-deprecated-declarations" go build -trimpath -buildmode=pie -buildvcs=false -tags netgo,osusergo,grpcnotrace \
      -ldflags "-s -w -X main.version=${VERSION} -extldflags=-Wl,-z,lazy,-z,relro" \
      -o /rootfs/usr/bin/gpuslice-agent ./cmd/gpuslice-agent
# The loader lies where the program names it, whatever the architecture, and the other libraries beside libc.
RUN program=/rootfs/usr/bin/gpuslice-agent && \
    loader=$(ldd "$program" | awk '$1 ~ "^/.*/ld-linux" { print $1 }') && \
    libc=$(ldd "$program" | awk '$1 == "libc.so.6" { print $3 }') && \
    for lib in "$loader" "$libc" \
        $(printf "${libc%/*}/%s " libm.so.6 libdl.so.2 librt.so.1 libpthread.so.0); do \
      install -D -m 755 "$(readlink -f "$lib")" "/rootfs$lib" || exit 1; \
    done

FROM scratch
COPY --from=build /rootfs /
# Only root may change how a GPU is divided: the driver asks for CAP_SYS_ADMIN and for its capability device files.
USER 0:0
ENTRYPOINT ["/usr/bin/gpuslice-agent"]
CMD ["run"]
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="gpuslice-agent" \
      org.opencontainers.image.description="Keeps a node's GPUs partitioned the way the node's labels ask" \
      org.opencontainers.image.source="https://github.com/gpuslice/gpuslice" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
