// Package proto holds the protobuf sources of the wire between nodes; the generated code is beside them.
//
// `go generate ./internal/proto` needs protoc, protoc-gen-go and protoc-gen-go-grpc in PATH.
package proto

//go:generate protoc --go_out=. --go_opt=paths=source_relative dpserve/v1/dpserve.proto
//go:generate protoc --go-grpc_out=. --go-grpc_opt=paths=source_relative dpserve/v1/dpserve.proto
