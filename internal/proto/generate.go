// Package proto holds the protobuf sources of the wire between nodes; the generated code is beside them.
//
// `go generate ./proto` needs protoc, protoc-gen-go and protoc-gen-go-grpc in PATH.
package proto

//go:generate protoc -I . --go_out=.. --go_opt=module=github.com/dpserve/dpserve --go-grpc_out=.. --go-grpc_opt=module=github.com/dpserve/dpserve dpserve/v1/dpserve.proto
