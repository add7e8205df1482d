package noderpc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"

	"github.com/dpserve/dpserve/internal/problem"
)

// CodecName is the content subtype of calls whose messages are Go structs as JSON. The ranks' streams are
// protobuf.
const CodecName = "json"

// rawJSON passes the bytes of a message: encode and decode write and read them, because an error in gRPC's
// decoding would lose its code and its hint.
type rawJSON struct{}

func init() { encoding.RegisterCodec(rawJSON{}) } //nolint:gochecknoinits // gRPC looks codecs up by name

func (rawJSON) Name() string { return CodecName }

func (rawJSON) Marshal(v any) ([]byte, error) {
	if data, ok := v.([]byte); ok {
		return data, nil
	}
	return nil, fmt.Errorf("a message is sent as its bytes, not as %T", v)
}

func (rawJSON) Unmarshal(data []byte, v any) error {
	into, ok := v.(*[]byte)
	if !ok {
		return fmt.Errorf("a message is received as its bytes, not as %T", v)
	}
	*into = data
	return nil
}

// validator is a message that refuses values out of its bounds, and cuts free text to them.
type validator interface{ Validate() error }

func encode[M any](m *M) ([]byte, error) {
	data, err := json.Marshal(m)
	if err != nil {
		return nil, problem.New(problem.Internal, "encode a message to another node: %w", err)
	}
	return data, nil
}

// decode reads and validates a message of another node. It passes over fields that this version does not
// know, and counts such a message; unknown may be nil.
func decode[M any](data []byte, unknown func(what string)) (*M, error) {
	m := new(M)
	strict := json.NewDecoder(bytes.NewReader(data))
	strict.DisallowUnknownFields()
	if strict.Decode(m) != nil {
		m = new(M)
		if err := json.Unmarshal(data, m); err != nil {
			if _, typed := errors.AsType[*problem.Error](err); typed {
				return nil, err
			}
			return nil, problem.New(problem.InvalidArgument, "read a message of another node: %w", err).
				WithHint("run the same version of dpserve on every node")
		}
		if unknown != nil {
			unknown("field")
		}
	}
	if v, ok := any(m).(validator); ok {
		return m, v.Validate()
	}
	return m, nil
}

// call is one unary call between nodes: its path, /SERVICE/METHOD, and the messages of its two directions.
type call[In, Out any] string

// to calls a method over a connection. Errors of the node come as a gRPC status.
func (c call[In, Out]) to(
	ctx context.Context, conn *grpc.ClientConn, in *In, opts ...grpc.CallOption,
) (out Out, err error) {
	request, err := encode(in)
	if err != nil {
		return out, err
	}
	var reply []byte
	opts = append(opts, grpc.CallContentSubtype(CodecName))
	if err := conn.Invoke(ctx, string(c), request, &reply, opts...); err != nil {
		return out, err
	}
	m, err := decode[Out](reply, nil)
	if err != nil {
		return out, err
	}
	return *m, nil
}

// serve is the method at its server.
func (c call[In, Out]) serve(
	unknown func(what string), do func(ctx context.Context, in *In) (Out, error),
) grpc.MethodDesc {
	answer := func(ctx context.Context, data []byte) ([]byte, error) {
		in, err := decode[In](data, unknown)
		if err != nil {
			return nil, err
		}
		out, err := do(ctx, in)
		if err != nil {
			return nil, err
		}
		return encode(&out)
	}
	return grpc.MethodDesc{
		MethodName: methodOf(string(c)),
		Handler: func(
			_ any, ctx context.Context, read func(any) error, _ grpc.UnaryServerInterceptor,
		) (any, error) {
			var data []byte
			if err := read(&data); err != nil {
				return nil, err
			}
			reply, err := answer(ctx, data)
			return reply, toStatus(err)
		},
	}
}

// stream is one streaming call between nodes. The end that opens it sends In and receives Out. For a call of
// one request, it sends that first.
type stream[In, Out any] string

// open opens a stream over a connection. It ends with ctx.
func (s stream[In, Out]) open(ctx context.Context, conn *grpc.ClientConn) (*pipe[In, Out], error) {
	ends := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	rpc, err := conn.NewStream(ctx, ends, string(s), grpc.CallContentSubtype(CodecName))
	if err != nil {
		return nil, err
	}
	return &pipe[In, Out]{rpc: rpc}, nil
}

// ask opens a stream with one request.
func (s stream[In, Out]) ask(ctx context.Context, conn *grpc.ClientConn, in *In) (*pipe[In, Out], error) {
	p, err := s.open(ctx, conn)
	if err == nil {
		err = p.Send(in)
	}
	return p, err
}

// serve is the stream at its server.
func (s stream[In, Out]) serve(unknown func(what string), do func(*pipe[Out, In]) error) grpc.StreamDesc {
	return grpc.StreamDesc{
		StreamName: methodOf(string(s)), ClientStreams: true, ServerStreams: true,
		Handler: func(_ any, rpc grpc.ServerStream) error {
			return toStatus(do(&pipe[Out, In]{rpc: rpc, unknown: unknown}))
		},
	}
}

// pipe is one end of a stream.
type pipe[Sent, Received any] struct {
	rpc interface {
		Context() context.Context
		SendMsg(m any) error
		RecvMsg(m any) error
	}
	unknown func(what string)
}

func (p *pipe[Sent, Received]) Context() context.Context { return p.rpc.Context() }

// Send sends a message.
func (p *pipe[Sent, Received]) Send(m *Sent) error {
	data, err := encode(m)
	if err != nil {
		return err
	}
	return p.rpc.SendMsg(data)
}

// Recv waits for the next message; io.EOF after the last one.
func (p *pipe[Sent, Received]) Recv() (*Received, error) {
	var data []byte
	if err := p.rpc.RecvMsg(&data); err != nil {
		return nil, err
	}
	return decode[Received](data, p.unknown)
}

func methodOf(path string) string { return path[strings.LastIndexByte(path, '/')+1:] }

// register adds a service to a gRPC server.
func register(to grpc.ServiceRegistrar, name string, calls []grpc.MethodDesc, streams ...grpc.StreamDesc) {
	to.RegisterService(&grpc.ServiceDesc{ServiceName: name, Methods: calls, Streams: streams}, nil)
}
