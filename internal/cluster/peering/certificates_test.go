package peering

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/state"
)

// memberFiles returns the files of a control node that joins now.
func memberFiles(t *testing.T) pki.Files {
	t.Helper()
	a, err := pki.NewAuthority("c", time.Now())
	require.NoError(t, err)
	var f pki.Files
	f.Authority, f.AuthorityKey = a.PEM()
	f.Key, err = pki.NewKey()
	require.NoError(t, err)
	csr, err := pki.NewCSR(f.Key)
	require.NoError(t, err)
	f.Cert, err = a.Sign(csr, pki.Identity{
		Cluster: "c", Node: "a", UID: "uid-a",
		Roles: []string{"control"},
	}, time.Now(), pki.DefaultLife)
	require.NoError(t, err)
	return f
}

// HF20: A keeper with the authority's key keeps a valid certificate for as long as it runs, also if some of
// its renewals fail for days.
func TestTheCertificateIsKeptValidFor60Days(t *testing.T) {
	t.Parallel()
	for name, fails := range map[string]time.Duration{
		"always": 0,
		"not for nine days after the first attempt": 9 * 24 * time.Hour,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				files := memberFiles(t)
				var held atomic.Pointer[pki.Credentials]
				load := func() {
					c, err := files.Credentials()
					require.NoError(t, err)
					held.Store(c)
				}
				load()
				first, renewed := held.Load(), 0
				var asked time.Time
				var log bytes.Buffer
				k := keeper{
					current: held.Load, log: slog.New(slog.NewTextHandler(&log, nil)),
					renew: func(context.Context) error {
						if asked.IsZero() {
							asked = time.Now()
							assert.WithinDuration(t, first.RenewAt(), asked, 0, "at two thirds of the life")
						}
						if time.Since(asked) < fails {
							return errors.New("nobody answers")
						}
						var err error
						files, err = files.Renewed(time.Now())
						load()
						renewed++
						return err
					},
				}
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan struct{})
				go func() { k.run(ctx); close(done) }()
				for range 60 * 24 {
					time.Sleep(time.Hour)
					synctest.Wait()
					require.False(t, held.Load().Expired(time.Now()), "after %s",
						time.Since(first.NotAfter.Add(-pki.DefaultLife)))
				}
				cancel()
				<-done
				assert.GreaterOrEqual(t, renewed, 2)
				assert.Equal(t, first.Identity, held.Load().Identity)
				assert.Equal(t, fails/renewRetry,
					time.Duration(strings.Count(log.String(), "not renewed, trying again")),
					"a line a minute")
			})
		})
	}
}

// TestACertificateThatIsNotRenewed: people are told a day after the first attempt, and when it has ended.
func TestACertificateThatIsNotRenewed(t *testing.T) {
	files := memberFiles(t)
	own, err := files.Credentials()
	require.NoError(t, err)
	c := &Certificates{}
	assert.Empty(t, c.Warning(time.Now()), "it has none yet")
	c.credentials.Store(own)
	assert.Empty(t, c.Warning(own.RenewAt().Add(renewOverdue-time.Minute)))
	assert.Equal(t, "its certificate ends on "+own.NotAfter.UTC().Format(time.DateOnly)+
		" and is not renewed; its log says why", c.Warning(own.RenewAt().Add(renewOverdue)))
	assert.Contains(t, c.Warning(own.NotAfter.Add(time.Second)), "its certificate has ended")
}

// HF20: A timer stands still while its machine sleeps, so the keeper checks the clock each hour. A
// certificate that becomes due meanwhile (the test replaces it by an older one) is renewed within the hour.
func TestTheCertificateIsLookedAtEveryHour(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		files := memberFiles(t)
		c, err := files.Credentials()
		require.NoError(t, err)
		var held atomic.Pointer[pki.Credentials]
		held.Store(c)
		due := make(chan time.Time, 1)
		k := keeper{
			current: held.Load, log: slog.New(slog.DiscardHandler),
			renew: func(context.Context) error {
				due <- time.Now()
				held.Store(c)
				return nil
			},
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { k.run(ctx); close(done) }()
		time.Sleep(36*time.Hour + 20*time.Minute)
		slept := files
		a, err := pki.LoadAuthority(files.Authority, files.AuthorityKey)
		require.NoError(t, err)
		csr, err := pki.NewCSR(files.Key)
		require.NoError(t, err)
		slept.Cert, err = a.Sign(csr, c.Identity, time.Now().Add(-25*24*time.Hour), pki.DefaultLife)
		require.NoError(t, err)
		old, err := slept.Credentials()
		require.NoError(t, err)
		held.Store(old)
		woke := time.Now()
		assert.LessOrEqual(t, (<-due).Sub(woke), time.Hour)
		cancel()
		<-done
	})
}

// signedAt returns the credentials of files with a certificate that a clock signed which showed that time.
func signedAt(t *testing.T, files pki.Files, at time.Time) (pki.Files, *pki.Credentials) {
	t.Helper()
	files, err := files.Renewed(at)
	require.NoError(t, err)
	own, err := files.Credentials()
	require.NoError(t, err)
	return files, own
}

// HF20: A control node whose clock was ahead has signed a certificate for itself that no node accepts once
// the clock is right. The next start signs another one, and the status says what is wrong until then.
func TestACertificateOfTheFutureIsRenewedAtStart(t *testing.T) {
	t.Parallel()
	now := time.Now()
	files, own := signedAt(t, memberFiles(t), now.Add(40*24*time.Hour))
	c := &Certificates{files: files, log: slog.New(slog.DiscardHandler)}
	c.credentials.Store(own)
	assert.Equal(t, "its certificate is not valid before "+own.NotBefore.UTC().Format(time.DateTime)+
		" UTC: check the clocks of this node and of the leader", c.Warning(now))
	require.NoError(t, c.begin(own))
	assert.False(t, c.credentials.Load().NotYetValid(now))
	assert.Empty(t, c.Warning(now))
}

// HF20: As above, without a start: the keeper looks at the clock each hour. A certificate that is not valid
// here after its renewal either, because the signer's clock differs, is renewed once an hour and not without
// end.
func TestACertificateOfTheFutureIsRenewedWithinTheHour(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		files := memberFiles(t)
		var held atomic.Pointer[pki.Credentials]
		var ahead, renewed atomic.Int64 // by how much the signer's clock is ahead; the renewals
		sign := func() {
			_, own := signedAt(t, files, time.Now().Add(time.Duration(ahead.Load())))
			held.Store(own)
		}
		sign()
		k := keeper{
			current: held.Load, log: slog.New(slog.DiscardHandler),
			renew: func(context.Context) error { renewed.Add(1); sign(); return nil },
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { k.run(ctx); close(done) }()
		time.Sleep(36*time.Hour + 20*time.Minute)
		ahead.Store(int64(40 * 24 * time.Hour)) // as if the clock was set back by so much now
		sign()
		ahead.Store(0)
		time.Sleep(time.Hour)
		synctest.Wait()
		assert.False(t, held.Load().NotYetValid(time.Now()))
		assert.EqualValues(t, 1, renewed.Load())

		ahead.Store(int64(3 * time.Hour))
		sign()
		time.Sleep(5*time.Hour + time.Minute)
		synctest.Wait()
		assert.EqualValues(t, 1+5, renewed.Load())
		cancel()
		<-done
	})
}

// hungDisk is a data dir whose disk does not finish a write until the test says so.
type hungDisk struct{ writes, finish chan struct{} }

func (h *hungDisk) write(string, pki.Files) error {
	h.writes <- struct{}{}
	<-h.finish
	return nil
}

// selfSigning certifies with an authority, as a control node does for itself.
type selfSigning struct{ files pki.Files }

func (s selfSigning) Certify(context.Context, pki.Identity, []byte) (cert, authority []byte, err error) {
	next, err := s.files.Renewed(time.Now())
	return next.Cert, next.Authority, err
}

func (s selfSigning) CertifyExpired(
	ctx context.Context, csr []byte, _ func(string, string) (*grpc.ClientConn, error),
) (cert, authority []byte, err error) {
	return s.Certify(ctx, pki.Identity{}, csr)
}

// HF44: Every renewal of the node's lease carries its record. A disk that hangs while a new gossip key or a
// new certificate are saved must not keep the node from it: it would lose its lease, and its ranks with it.
func TestTheRecordDoesNotWaitForTheDisk(t *testing.T) {
	key := []byte("the new key")
	for name, save := range map[string]func(p *Peering) error{
		"a new gossip key": func(p *Peering) error { p.OfferGossipKey(key); return nil },
		"a renewal":        func(p *Peering) error { return p.Certificates.renew(t.Context()) },
		"the authority":    func(p *Peering) error { return p.Certificates.saveAuthority(false) },
	} {
		t.Run(name, func(t *testing.T) {
			dir, st := newDataDir(t), &heldState{state.New()}
			founder(t, dir)
			p := opened(t, memberConfig(dir, st))
			disk := &hungDisk{writes: make(chan struct{}, 4), finish: make(chan struct{})}
			p.Certificates.write = disk.write
			p.Certificates.leader = func() Certifier { return selfSigning{p.Certificates.files} }
			st.held.Secrets.AuthorityKey = []byte("another key")
			before := p.Record()

			ctx, cancel := context.WithCancel(t.Context())
			var loops sync.WaitGroup
			loops.Go(func() { p.KeepGossipKey(ctx) })
			loops.Go(func() { assert.NoError(t, save(p)) })
			<-disk.writes
			read := make(chan struct{})
			go func() {
				defer close(read)
				p.OfferGossipKey(key)
				p.OfferGossipKey(key)
				assert.Equal(t, before, p.Record(), "a key that is not on the disk is not reported")
				_, err := p.Certificates.KeySum()
				assert.NoError(t, err)
			}()
			select {
			case <-read:
			case <-time.After(10 * time.Second):
				t.Error("the record waits for the disk")
			}
			close(disk.finish)
			require.Eventually(t, func() bool {
				return bytes.Equal(key, p.Certificates.current().GossipKey)
			}, 30*time.Second, time.Millisecond, "the key that was offered is saved after the rest")
			cancel()
			loops.Wait()
			<-read
			require.NoError(t, p.Close())
		})
	}
}

// A removed node's certificate has expired before the cluster forgets the removal.
func TestRemovedNodesAreKnownLongerThanCertificatesLive(t *testing.T) {
	assert.Greater(t, state.RemovedFor, pki.DefaultLife)
}
