// Package proto holds the protobuf sources of the wire between nodes; the generated code is beside them.
//
// `go generate ./internal/proto` needs protoc and protoc-gen-go in PATH.
package proto

//go:generate protoc --go_out=. --go_opt=paths=source_relative dpserve/v1/dpserve.proto
