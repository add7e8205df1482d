package noderpc

import (
	"context"
	"crypto/sha256"
	"errors"
	"net"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// The steps of a join; an error begins with the one that failed.
const (
	stepToken       = "token"
	stepCertificate = "certificate"
	stepMember      = "member"
)

// Bounds of a node's record, as a stranger or a peer may hand it in.
const (
	maxNodeID  = 128
	maxSlots   = 4096
	maxDevices = 1024
	maxLabels  = 64
)

// stepError puts the step in front of an error, in place of the command that the state refused.
func stepError(step string, err error) *problem.Error {
	why := err.Error()
	for _, command := range []string{"use token: ", "put node: "} {
		why = strings.TrimPrefix(why, command)
	}
	e := problem.New(problem.CodeOf(err), "%w", &wireError{text: step + ": " + why, is: []error{err}})
	if inner, ok := errors.AsType[*problem.Error](err); ok {
		e.Hint, e.Doc, e.Details = inner.Hint, inner.Doc, inner.Details
	}
	return e
}

// checkNode refuses a record that no node of a cluster can have. msg.ValidateNode bounds its size.
func checkNode(n *state.Node) error {
	_, _, badAddress := net.SplitHostPort(n.Address)
	_, _, badGossip := net.SplitHostPort(n.Gossip)
	o := &n.Resources
	switch {
	case n.ID == "" || len(n.ID) > maxNodeID || strings.ContainsAny(n.ID, "/ \t\r\n") ||
		n.ID != cleanText(n.ID, maxNodeID):
		return badNode("its name %q must be 1 to %d bytes without spaces and slashes",
			cleanText(n.ID, maxNodeID), maxNodeID)
	case n.UID == "" || len(n.UID) > maxNodeID:
		return badNode("it has no UID")
	case badAddress != nil:
		return badNode("its node port %q is not HOST:PORT", cleanText(n.Address, maxNodeID))
	case badGossip != nil:
		return badNode("its gossip address %q is not HOST:PORT", cleanText(n.Gossip, maxNodeID))
	case o.Slots < 0 || o.Slots > maxSlots || len(o.Devices) > maxDevices || len(o.Labels) > maxLabels:
		return badNode("it offers more than %d slots, %d devices or %d labels", maxSlots, maxDevices,
			maxLabels)
	case len(o.Taken) > state.MaxTakenRanges:
		return badNode("it names more than %d ranges of taken ports", state.MaxTakenRanges)
	case o.PortLo < 0 || o.PortHi < o.PortLo || o.PortHi > 65535:
		return badNode("its port range %d-%d is none", o.PortLo, o.PortHi)
	}
	return checkRoles(n.Roles)
}

func checkRoles(roles []state.Role) error {
	if len(roles) == 0 {
		return badNode("it has no role")
	}
	for i, r := range roles {
		known := r == state.RoleControl || r == state.RoleWorker || r == state.RoleIngress
		if !known || slices.Contains(roles[:i], r) {
			return badNode("role %q is unknown or given twice", cleanText(string(r), maxNodeID))
		}
	}
	return nil
}

func badNode(format string, args ...any) error {
	return problem.New(problem.InvalidArgument, "the node cannot be a member: "+format,
		args...).WithHint("look at its flags: dpserve join --help")
}

// Pauses between two attempts to join a cluster that has no leader.
const (
	joinPauseMin = 200 * time.Millisecond
	joinPauseMax = time.Second
)

// JoinConfig is the configuration of Join. Key and Dial are optional.
type JoinConfig struct {
	Address string            // HOST:PORT of the node port of a member with role control
	Token   string            // as `dpserve start` printed it
	Node    state.Node        // the node that joins
	Key     []byte            // PEM, which a repeated join needs; nil: a new one
	Dial    nodeport.DialFunc // nil: TCP
}

// The call of the Enroll service, the one that answers without a certificate: the token stands for it.
const (
	enrollService = "dpserve.v1.Enroll"

	joinCall = call[joinRequest, Joined]("/" + enrollService + "/Join")
)

type joinRequest struct {
	Token string // the secret part
	CSR   []byte // PKCS #10, DER
	Node  state.Node
}

// Joined is the answer to a join, and what a member keeps on its disk.
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
	joined, err := enroll(ctx, &cfg, token.Fingerprint,
		&joinRequest{Token: token.SecretText(), CSR: csr, Node: cfg.Node})
	if err != nil {
		return nil, err
	}
	joined.Files.Key = key
	return joined, joined.check(token.Fingerprint, &cfg.Node)
}

// enroll asks until there is an answer that another attempt would not change.
func enroll(
	ctx context.Context, cfg *JoinConfig, fingerprint [sha256.Size]byte, req *joinRequest,
) (*Joined, error) {
	ctx, cancel := context.WithTimeout(ctx, joinLimit)
	defer cancel()
	conn, err := nodeport.JoinGRPC(ctx, cfg.Dial, cfg.Address, fingerprint)
	if err != nil {
		return nil, dialError(err)
	}
	defer func() { _ = conn.Close() }() // no call is open
	var before error                    // the answer of the attempt before this one
	for wait := joinPauseMin; ; wait = min(2*wait, joinPauseMax) {
		joined, err := joinCall.to(ctx, conn, req, grpc.MaxCallRecvMsgSize(maxEnroll))
		if err == nil {
			return &joined, nil
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

// Validate drops seeds beyond the bound.
func (j *Joined) Validate() error {
	j.Seeds = j.Seeds[:min(len(j.Seeds), maxSeeds)]
	return nil
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
