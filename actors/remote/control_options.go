package remote

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// Bounds of messages, in bytes. The largest request is a report with all its log lines, the largest reply is
// the state of the cluster.
const (
	maxRequest     = 16 << 20
	maxReply       = 64 << 20
	maxEnroll      = 1 << 20
	maxEnrollCalls = 64     // calls of strangers on one connection
	maxMemberCalls = 10_000 // calls of one member on one connection; the bound is admission
)

// ServerOptions are the options of the gRPC server for members: bounds, and a counter of methods and fields
// that this version does not know. It refuses unknown methods and ignores unknown fields.
func ServerOptions(unknown func(what string)) []grpc.ServerOption {
	if unknown == nil {
		unknown = func(string) {}
	}
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxRequest), grpc.MaxConcurrentStreams(maxMemberCalls),
		grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error {
			unknown("method")
			return status.Error(codes.Unimplemented, "unknown method")
		}),
		grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo,
			next grpc.UnaryHandler) (any, error) {
			if m, ok := req.(proto.Message); ok && len(m.ProtoReflect().GetUnknown()) > 0 {
				unknown("field")
			}
			return next(ctx, req)
		}),
	}
}

// EnrollOptions are the options of the gRPC server for strangers: it serves Enroll alone, in small messages.
func EnrollOptions() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.MaxRecvMsgSize(maxEnroll), grpc.MaxConcurrentStreams(maxEnrollCalls)}
}

// callOptions are the options of every call to another node.
func callOptions() []grpc.CallOption { return []grpc.CallOption{grpc.MaxCallRecvMsgSize(maxReply)} }
