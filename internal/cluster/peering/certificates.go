package peering

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

const (
	// maxRenewPause is the longest pause between two checks of the wall clock. Timers stand still while a
	// machine sleeps, but certificates continue to age.
	maxRenewPause = time.Hour
	// renewRetry is the pause before a failed renewal of the certificate is repeated. A third of the
	// certificate's life is left for it.
	renewRetry = time.Minute
	// expiredRetry is the pause after the certificate has expired, or while it is not valid yet. The node is
	// cut off until it has a new one.
	expiredRetry = 2 * time.Second
)

// Certifier signs certificates, here or at the leader.
type Certifier interface {
	Certify(ctx context.Context, own pki.Identity, csr []byte) (cert, authority []byte, err error)
	// CertifyExpired is for a node whose certificate has expired. dial makes a connection for it alone.
	CertifyExpired(ctx context.Context, csr []byte,
		dial func(address, uid string) (*grpc.ClientConn, error)) (cert, authority []byte, err error)
}

// Certificates keeps this node's certificate and the gossip key, in memory and in the data dir. It renews the
// certificate.
type Certificates struct {
	dir    string                              // "" = in memory
	write  func(dir string, f pki.Files) error // pki.Save
	log    *slog.Logger
	store  Store
	leader func() Certifier
	port   *nodeport.Port

	credentials atomic.Pointer[pki.Credentials]
	// saving is held over a change of files and its write to the disk, mu only over the change in memory:
	// each renewal of the lease reads the gossip key, and must not wait for a disk that hangs. saving comes
	// before mu.
	saving sync.Mutex
	mu     sync.Mutex // guards files once the node runs
	files  pki.Files
}

// ExpiresAt is when the node's certificate for other nodes ends.
func (c *Certificates) ExpiresAt() time.Time { return c.credentials.Load().NotAfter }

func loadFiles(dir string) (pki.Files, error) {
	if dir == "" {
		return pki.Files{}, fs.ErrNotExist
	}
	return pki.Load(dir)
}

// begin presents a certificate from now on. A control node whose certificate is due signs for itself before
// it talks to any other node: after a long time with all nodes off every certificate is expired, and no node
// could ask another one.
func (c *Certificates) begin(own *pki.Credentials) error {
	c.credentials.Store(own)
	now := time.Now()
	if len(c.files.AuthorityKey) == 0 || !isDue(own, now) {
		return nil
	}
	next, err := c.files.Renewed(now)
	if err != nil {
		return err
	}
	return c.use(own, next)
}

// isDue reports whether a certificate has to be renewed. One that is not valid yet was signed by a clock that
// was ahead and was put right since.
func isDue(own *pki.Credentials, now time.Time) bool {
	return !now.Before(own.RenewAt()) || own.NotYetValid(now) // wall-clock times
}

// Keep renews the certificate after two thirds of its life, until ctx ends. Open connections continue.
func (c *Certificates) Keep(ctx context.Context) {
	keeper{current: c.credentials.Load, renew: c.renew, log: c.log}.run(ctx)
}

// renewOverdue is how long a renewal may fail before people are told: a certificate has ten days left then.
const renewOverdue = 24 * time.Hour

// Warning says that the certificate is not valid, or ends and is not renewed; "" = it is renewed in time.
func (c *Certificates) Warning(now time.Time) string {
	own := c.credentials.Load()
	switch {
	case own == nil:
		return ""
	case own.NotYetValid(now):
		return "its certificate is not valid before " + own.NotBefore.UTC().Format(time.DateTime) +
			" UTC: check the clocks of this node and of the leader"
	case now.Before(own.RenewAt().Add(renewOverdue)):
		return ""
	case own.Expired(now):
		return "its certificate has ended and is not renewed; its log says why"
	}
	return "its certificate ends on " + own.NotAfter.UTC().Format(time.DateOnly) +
		" and is not renewed; its log says why"
}

// renew gets and saves a new certificate for the same key. A node with role control signs for itself; other
// nodes ask a control node.
func (c *Certificates) renew(ctx context.Context) error {
	csr, err := c.newCSR()
	if err != nil {
		return err
	}
	own, secrets := c.credentials.Load(), c.store.State().Secrets
	var cert, authority []byte
	if own.Expired(time.Now()) && len(secrets.AuthorityKey) == 0 {
		cert, authority, err = c.leader().CertifyExpired(ctx, csr, c.port.RenewGRPC)
	} else {
		cert, authority, err = c.leader().Certify(ctx, own.Identity, csr)
	}
	if err != nil {
		return err
	}
	c.saving.Lock()
	defer c.saving.Unlock()
	next := c.current()
	next.Cert, next.Authority = cert, authority
	if len(secrets.AuthorityKey) > 0 {
		next.AuthorityKey = secrets.AuthorityKey
	}
	return c.use(own, next)
}

// use saves files with a renewed certificate and presents it from now on. If the disk refuses the write, the
// certificate is used from memory until the next start. The caller holds saving or is the only goroutine.
func (c *Certificates) use(own *pki.Credentials, next pki.Files) error {
	creds, err := next.Credentials()
	if err != nil {
		return err
	}
	if now, was := creds.Identity, own.Identity; now.Cluster != was.Cluster || now.Node != was.Node ||
		now.UID != was.UID || !state.SameRoles(now.Roles, was.Roles) {
		return problem.New(problem.Conflict,
			"the new certificate is for node %s (%s) with roles %v, not for %s (%s) with %v",
			now.Node, now.UID, now.Roles, was.Node, was.UID, was.Roles).
			WithHint("remove the node, and join with an empty --data-dir and a new token")
	}
	if err := c.save(next); err != nil {
		c.log.Warn("the renewed certificate could not be kept for the next start", slog.Any("err", err))
		c.hold(next)
	}
	c.credentials.Store(creds)
	c.log.Info("the node's certificate was renewed", slog.Time("expires", creds.NotAfter))
	return nil
}

// save keeps files in the data dir and in memory. The caller holds saving or is the only goroutine.
func (c *Certificates) save(files pki.Files) error {
	if c.dir != "" {
		if err := c.write(c.dir, files); err != nil {
			return err
		}
	}
	c.hold(files)
	return nil
}

// current returns the files in memory.
func (c *Certificates) current() pki.Files {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.files
}

// hold keeps files in memory.
func (c *Certificates) hold(files pki.Files) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.files = files
}

// saveAuthority stores the authority's key beside the node's own files. A founder writes its files only now,
// after the cluster's state holds the authority: a crash before that would leave a certificate without an
// authority behind it. Other control nodes need the key to sign for themselves (begin).
func (c *Certificates) saveAuthority(founding bool) error {
	if c.dir == "" {
		return nil
	}
	c.saving.Lock()
	defer c.saving.Unlock()
	secrets, own := c.store.State().Secrets, c.current()
	next := own
	next.AuthorityKey = secrets.AuthorityKey
	if !founding {
		if len(secrets.AuthorityKey) == 0 || bytes.Equal(own.AuthorityKey, secrets.AuthorityKey) {
			return nil
		}
		if err := c.save(next); err != nil {
			c.log.Warn("the authority's key could not be kept, trying again at the next renewal",
				slog.Any("err", err))
		}
		return nil
	}
	if !bytes.Equal(secrets.Authority, own.Authority) {
		return problem.New(problem.Conflict, "the certificates of this node's cluster are gone from %s",
			c.dir).
			WithHint("restore that folder from a backup; otherwise this node has to be removed and to " +
				"join again with an empty --data-dir")
	}
	return c.save(next)
}

// KeySum is the hash of this node's public key, which binds the node's record to the key.
func (c *Certificates) KeySum() (string, error) {
	csr, err := c.newCSR()
	if err != nil {
		return "", err
	}
	return pki.KeySum(csr)
}

// newCSR makes a certificate request for this node's key.
func (c *Certificates) newCSR() ([]byte, error) {
	return pki.NewCSR(c.current().Key)
}

// takeGossipKey keeps a new gossip key, after use has taken it. The one that it has already changes nothing.
func (c *Certificates) takeGossipKey(key []byte, use func() error) error {
	c.saving.Lock()
	defer c.saving.Unlock()
	next := c.current()
	if bytes.Equal(next.GossipKey, key) {
		return nil
	}
	next.GossipKey = key
	if err := errors.Join(use(), c.save(next)); err != nil {
		return err
	}
	c.log.Info("the key of the gossip has changed")
	return nil
}

// keeper renews a certificate after two thirds of its life, and one that is not valid yet.
type keeper struct {
	current func() *pki.Credentials
	renew   func(ctx context.Context) error
	log     *slog.Logger
}

// run renews the certificate until ctx ends.
func (k keeper) run(ctx context.Context) {
	var warned time.Time
	for {
		now, wait := time.Now(), time.Duration(0)
		switch c := k.current(); {
		case !isDue(c, now):
			wait = min(c.RenewAt().Sub(now), maxRenewPause)
		default:
			err := k.renew(ctx)
			if err == nil {
				if isDue(k.current(), time.Now()) { // the signer has another time: its next one is the same
					wait = maxRenewPause
				}
				break
			}
			wait = renewRetry
			if c.Expired(now) || c.NotYetValid(now) {
				wait = expiredRetry
			}
			if ctx.Err() == nil && time.Since(warned) >= renewRetry {
				warned = time.Now()
				k.log.Warn("the node's certificate was not renewed, trying again",
					slog.Time("expires", c.NotAfter), slog.Any("err", err))
			}
		}
		if pause.For(ctx, max(wait, time.Millisecond)) != nil {
			return
		}
	}
}
