package noderpc

import (
	"context"
	"crypto/sha256"
	"errors"
	"time"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/problem"
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
	"github.com/dpserve/dpserve/internal/state"
)

// Pauses between two attempts to join a cluster that has no leader.
const (
	joinPauseMin = 200 * time.Millisecond
	joinPauseMax = time.Second
)

// JoinConfig is the configuration of Join. Key and Dial are optional.
type JoinConfig struct {
	Address string     // HOST:PORT of the node port of a member with role control
	Token   string     // as `dpserve start` printed it
	Node    state.Node // the node that joins
	Key     []byte     // PEM, which a repeated join needs; nil: a new one
	// Dial connects to the node at an address, which must show the authority with this fingerprint. nil =
	// nodeport.JoinGRPC over TCP.
	Dial func(ctx context.Context, address string, fingerprint [sha256.Size]byte) (*grpc.ClientConn, error)
}

// Joined is what a member keeps on its disk.
type Joined struct {
	Cluster string
	Files   pki.Files
	Seeds   []state.Node // addresses of other members, without their resources
}

// Join makes a node a member: it uses the token, gets a signed certificate, and its record is put into the
// state. It may be repeated with the same UID and key as often as needed. An error begins with the step that
// failed: token, certificate or member. It takes at most 10 s.
func Join(ctx context.Context, cfg JoinConfig) (*Joined, error) {
	token, err := pki.ParseToken(cfg.Token)
	if err != nil {
		return nil, stepError(stepToken, err)
	}
	key := cfg.Key
	if key == nil {
		if key, err = pki.NewKey(); err != nil {
			return nil, stepError(stepCertificate, err)
		}
	}
	csr, err := pki.NewCSR(key)
	if err != nil {
		return nil, stepError(stepCertificate, err)
	}
	req, err := encodeJoin(token, &cfg.Node, csr)
	if err != nil {
		return nil, stepError(stepMember, err)
	}
	reply, err := enroll(ctx, &cfg, token.Fingerprint, req)
	if err != nil {
		return nil, err
	}
	joined := decodeJoined(reply, key)
	return joined, joined.check(token.Fingerprint, &cfg.Node)
}

// enroll asks until there is an answer that another attempt would not change.
func enroll(
	ctx context.Context, cfg *JoinConfig, fingerprint [sha256.Size]byte, req *dpservev1.JoinRequest,
) (*dpservev1.JoinReply, error) {
	ctx, cancel := context.WithTimeout(ctx, joinLimit)
	defer cancel()
	conn, err := cfg.dial(ctx, fingerprint)
	if err != nil {
		return nil, dialError(err)
	}
	defer func() { _ = conn.Close() }() // no call is open
	var before error                    // the answer of the attempt before this one
	for wait := joinPauseMin; ; wait = min(2*wait, joinPauseMax) {
		reply, err := dpservev1.NewEnrollClient(conn).Join(ctx, req, grpc.MaxCallRecvMsgSize(maxEnroll))
		if err == nil {
			return reply, nil
		}
		err = fromStatus(cfg.Address, err)
		// the deadline is over: the answer before says more
		if before != nil && ctx.Err() != nil {
			return nil, enrollError(before)
		}
		if again := problem.CodeOf(err) == problem.Unavailable && !errors.Is(err, errUnreachable); !again ||
			pause.For(ctx, wait) != nil {
			return nil, enrollError(err)
		}
		before = err
	}
}

func (cfg *JoinConfig) dial(ctx context.Context, fingerprint [sha256.Size]byte) (*grpc.ClientConn, error) {
	if cfg.Dial != nil {
		return cfg.Dial(ctx, cfg.Address, fingerprint)
	}
	return nodeport.JoinGRPC(ctx, nil, cfg.Address, fingerprint)
}

// dialError names the step that a connection was needed for. A node that shows another authority does not
// belong to the token's cluster.
func dialError(err error) error {
	switch {
	case errors.Is(err, nodeport.ErrOtherCluster):
		return stepError(stepToken, err)
	case errors.Is(err, nodeport.ErrExpired):
		return stepError(stepCertificate, err)
	default:
		return stepError(stepMember, err)
	}
}

// enrollError names the step that failed at the other side.
func enrollError(err error) error {
	if errors.Is(err, errUnreachable) || errors.Is(err, context.DeadlineExceeded) {
		return stepError(stepMember, err)
	}
	return err
}

// check refuses an answer that is not from the token's cluster, or not for this node.
func (j *Joined) check(fingerprint [sha256.Size]byte, n *state.Node) error {
	got, err := pki.Fingerprint(j.Files.Authority)
	if err == nil && got != fingerprint {
		err = problem.New(problem.Conflict, "it is of another authority than the token")
	}
	if err != nil {
		return stepError(stepCertificate, err)
	}
	c, err := j.Files.Credentials()
	if err == nil && (c.Identity.Node != n.ID || c.Identity.UID != n.UID || c.Identity.Cluster != j.Cluster) {
		err = problem.New(problem.Conflict, "it is for node %s (%s) of cluster %s", c.Identity.Node,
			c.Identity.UID, c.Identity.Cluster)
	}
	if err != nil {
		return stepError(stepCertificate, err)
	}
	return nil
}
