package pki_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var start = time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)

func member(node string) pki.Identity {
	return pki.Identity{Cluster: "c1", Node: node, UID: "uid-" + node, Roles: []string{"control", "worker"}}
}

// files makes a member of an authority.
func files(t testing.TB, a *pki.Authority, id pki.Identity, life time.Duration) pki.Files {
	t.Helper()
	key, err := pki.NewKey()
	require.NoError(t, err)
	csr, err := pki.NewCSR(key)
	require.NoError(t, err)
	cert, err := a.Sign(csr, id, start, life)
	require.NoError(t, err)
	ca, _ := a.PEM()
	return pki.Files{
		Key: key, Cert: cert, Authority: ca,
		GossipKey: []byte("0123456789abcdef0123456789abcdef"),
	}
}

func authority(t testing.TB, cluster string) *pki.Authority {
	t.Helper()
	a, err := pki.NewAuthority(cluster, start)
	require.NoError(t, err)
	return a
}

func TestAMemberIsKnownByItsCertificate(t *testing.T) {
	a := authority(t, "c1")
	certPEM, keyPEM := a.PEM()
	a, err := pki.LoadAuthority(certPEM, keyPEM)
	require.NoError(t, err)
	assert.Equal(t, "c1", a.Cluster())

	c, err := files(t, a, member("n1"), pki.DefaultLife).Credentials()
	require.NoError(t, err)
	assert.Equal(t, member("n1"), c.Identity)
	assert.Equal(t, start.Add(30*24*time.Hour), c.NotAfter)
	assert.Equal(t, start.Add(20*24*time.Hour), c.RenewAt())
	assert.True(t, c.Identity.HasRole("ingress", "worker"))
	assert.False(t, c.Identity.HasRole("ingress"))

	for _, usage := range []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth} {
		for when, ok := range map[time.Time]bool{
			start.Add(-2 * time.Hour): false, start.Add(-59 * time.Minute): true, start: true,
			c.NotAfter.Add(time.Second): false,
		} {
			_, err = c.Certificate.Leaf.Verify(x509.VerifyOptions{
				Roots:     c.Pool,
				KeyUsages: []x509.ExtKeyUsage{usage}, CurrentTime: when,
			})
			assert.Equal(t, ok, err == nil, "%s: %v", when, err)
		}
	}
}

func TestOfTheRequestOnlyTheKeyCounts(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		DNSNames: []string{"other"}, IPAddresses: []net.IP{net.IPv4(10, 0, 0, 1)},
		URIs: []*url.URL{{Scheme: "dpserve", Path: "/c1/boss"}},
	}, key)
	require.NoError(t, err)
	certPEM, err := authority(t, "c1").Sign(csr, member("n1"), start, time.Hour)
	require.NoError(t, err)
	block, _ := pem.Decode(certPEM)
	cert, err := x509.ParseCertificate(block.Bytes)
	require.NoError(t, err)
	assert.Empty(t, cert.DNSNames)
	assert.Empty(t, cert.IPAddresses)
	assert.False(t, cert.IsCA)
	id, err := pki.IdentityOf(cert)
	require.NoError(t, err)
	assert.Equal(t, member("n1"), id)
}

func TestWhatIsNotSigned(t *testing.T) {
	a := authority(t, "c1")
	key, err := pki.NewKey()
	require.NoError(t, err)
	csr, err := pki.NewCSR(key)
	require.NoError(t, err)
	forged := append([]byte{}, csr...)
	forged[len(forged)-1] ^= 1
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	rsaCSR, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, rsaKey)
	require.NoError(t, err)
	other, noUID, long := member("n"), member("n"), member("n")
	other.Cluster, noUID.UID, long.Node = "c2", "", strings.Repeat("x", 300)

	for name, test := range map[string]struct {
		csr  []byte
		id   pki.Identity
		life time.Duration
	}{
		"junk":          {[]byte("junk"), member("n"), time.Hour},
		"huge":          {make([]byte, 1<<20), member("n"), time.Hour},
		"forged":        {forged, member("n"), time.Hour},
		"RSA":           {rsaCSR, member("n"), time.Hour},
		"other cluster": {csr, other, time.Hour},
		"no UID":        {csr, noUID, time.Hour},
		"long name":     {csr, long, time.Hour},
		"no life":       {csr, member("n"), 0},
	} {
		_, err := a.Sign(test.csr, test.id, start, test.life)
		assert.Equal(t, problem.InvalidArgument, problem.CodeOf(err), "%s: %v", name, err)
	}
	cert, err := a.Sign(csr, member("n"), start, 50*365*24*time.Hour)
	require.NoError(t, err)
	c, err := pki.NewCredentials(caOf(a), cert, key)
	require.NoError(t, err)
	assert.Equal(t, start.Add(pki.AuthorityLife), c.NotAfter, "no longer than the authority")
}

func caOf(a *pki.Authority) []byte { ca, _ := a.PEM(); return ca }

func TestCredentialsBelongTogether(t *testing.T) {
	a, b := authority(t, "c1"), authority(t, "c1")
	f := files(t, a, member("n1"), time.Hour)
	g := files(t, a, member("n2"), time.Hour)
	for name, broken := range map[string]pki.Files{
		"other key":       {Authority: f.Authority, Cert: f.Cert, Key: g.Key},
		"other authority": {Authority: caOf(b), Cert: f.Cert, Key: f.Key},
		"no key":          {Authority: f.Authority, Cert: f.Cert},
		"no authority":    {Cert: f.Cert, Key: f.Key},
		"authority as certificate": {
			Authority: f.Authority, Cert: f.Authority, Key: f.Key,
		},
	} {
		_, err := broken.Credentials()
		var p *problem.Error
		require.ErrorAs(t, err, &p, name)
	}
	_, err := pki.LoadAuthority(caOf(a), f.Key)
	require.Error(t, err)
	_, err = pki.LoadAuthority(f.Cert, f.Key)
	require.Error(t, err, "a member is no authority")
}

func TestIdentitiesSurviveTheCertificate(t *testing.T) {
	part := rapid.StringN(1, 40, 256)
	rapid.Check(t, func(r *rapid.T) {
		id := pki.Identity{
			Cluster: part.Draw(r, "cluster"), Node: part.Draw(r, "node"), UID: part.Draw(r, "uid"),
			Roles: rapid.SliceOfN(part, 1, 4).Draw(r, "roles"),
		}
		a, err := pki.NewAuthority(id.Cluster, start)
		if err != nil || a.Cluster() != id.Cluster {
			r.Skip("no name for a cluster")
		}
		c, err := files(t, a, id, time.Hour).Credentials()
		require.NoError(r, err)
		assert.Equal(r, id, c.Identity)
	})
}

func TestStrangeCertificatesNameNobody(t *testing.T) {
	for _, uri := range []string{
		"", "https://c1/n1?uid=u", "dpserve://c1/n1?uid=u", "dpserve:///c1", "dpserve:///c1/n1",
		"dpserve:///c1/n1/n2?uid=u", "dpserve:///c1/?uid=u",
		"dpserve:///c1/n1?uid=u&role=", "dpserve:///c1/n1?uid=%zz", "dpserve:opaque",
	} {
		u, err := url.Parse(uri)
		require.NoError(t, err)
		_, err = pki.IdentityOf(&x509.Certificate{URIs: []*url.URL{u}})
		assert.Equal(t, problem.Unauthenticated, problem.CodeOf(err), uri)
	}
	_, err := pki.IdentityOf(&x509.Certificate{})
	require.Error(t, err)
	_, err = pki.IdentityOf(nil)
	require.Error(t, err)
}

func TestFilesAreWholeOrAbsent(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pki")
	_, err := pki.Load(dir)
	require.ErrorIs(t, err, os.ErrNotExist)

	a := authority(t, "c1")
	f := files(t, a, member("n1"), time.Hour)
	require.NoError(t, pki.Save(dir, f))
	got, err := pki.Load(dir)
	require.NoError(t, err)
	assert.Equal(t, f, got)
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Len(t, entries, 4, "no temporary file stays")
	for _, e := range entries {
		info, err := e.Info()
		require.NoError(t, err)
		assert.Equal(t, os.FileMode(0o600), info.Mode().Perm(), e.Name())
	}

	// A newcomer's key and its predecessor's certificate never exist together: the certificate is removed
	// first and written last.
	require.NoError(t, os.Remove(filepath.Join(dir, "gossip.key")))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "gossip.key"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "gossip.key", "x"), nil, 0o600))
	require.Error(t, pki.Save(dir, files(t, a, member("n2"), time.Hour)), "stops half way")
	_, err = pki.Load(dir)
	require.ErrorIs(t, err, os.ErrNotExist)

	require.NoError(t, os.RemoveAll(filepath.Join(dir, "gossip.key")))
	require.NoError(t, pki.Save(dir, f))
	require.NoError(t, os.Remove(filepath.Join(dir, "key.pem")))
	_, err = pki.Load(dir)
	require.Equal(t, problem.Conflict, problem.CodeOf(err))
	require.NotErrorIs(t, err, os.ErrNotExist, "damage is not a node that has not joined")
}

// TestFilesOfAControlNodeRenewThemselves: a control node keeps the authority's key beside its certificate and
// signs its next one with it. Other nodes have no such file.
func TestFilesOfAControlNodeRenewThemselves(t *testing.T) {
	now := time.Now()
	a, err := pki.NewAuthority("c1", now.Add(-90*24*time.Hour))
	require.NoError(t, err)
	dir := t.TempDir()
	key, err := pki.KeepKey(dir)
	require.NoError(t, err)
	again, err := pki.KeepKey(dir)
	require.NoError(t, err)
	assert.Equal(t, key, again, "a join that is repeated shows the same key")
	_, err = pki.Load(dir)
	require.ErrorIs(t, err, fs.ErrNotExist, "a key alone is no membership")
	csr, err := pki.NewCSR(key)
	require.NoError(t, err)
	id := pki.Identity{Cluster: "c1", Node: "a", UID: "u", Roles: []string{"control"}}
	f := pki.Files{Key: key, GossipKey: []byte("g")}
	f.Authority, _ = a.PEM()
	f.Cert, err = a.Sign(csr, id, now.Add(-60*24*time.Hour), pki.DefaultLife)
	require.NoError(t, err)
	require.NoError(t, pki.Save(dir, f))
	loaded, err := pki.Load(dir)
	require.NoError(t, err)
	assert.Equal(t, f, loaded)
	_, err = loaded.Renewed(now)
	require.Error(t, err, "without the authority's key")

	_, f.AuthorityKey = a.PEM()
	require.NoError(t, pki.Save(dir, f))
	loaded, err = pki.Load(dir)
	require.NoError(t, err)
	assert.Equal(t, f, loaded)
	old, err := loaded.Credentials()
	require.NoError(t, err)
	assert.True(t, old.Expired(now))
	next, err := loaded.Renewed(now)
	require.NoError(t, err)
	c, err := next.Credentials()
	require.NoError(t, err)
	assert.Equal(t, id, c.Identity)
	assert.WithinDuration(t, now.Add(pki.DefaultLife), c.NotAfter, time.Second)
	assert.Equal(t, key, next.Key)
}

func TestTokens(t *testing.T) {
	ca := caOf(authority(t, "c1"))
	token, err := pki.NewToken(ca)
	require.NoError(t, err)
	print, err := pki.Fingerprint(ca)
	require.NoError(t, err)
	assert.Equal(t, print, token.Fingerprint)

	text := token.String()
	got, err := pki.ParseToken(" " + text + "\n")
	require.NoError(t, err)
	assert.Equal(t, token, got)
	hash, err := pki.HashSecret(token.SecretText())
	require.NoError(t, err)
	assert.Equal(t, token.Hash(), hash)
	assert.Len(t, hash, 64)
	assert.NotContains(t, hash, token.SecretText())

	another, err := pki.NewToken(ca)
	require.NoError(t, err)
	assert.NotEqual(t, token.Hash(), another.Hash())

	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("joins", "token", token)
	assert.NotContains(t, log.String(), text)
	assert.NotContains(t, log.String(), token.SecretText())
}

func TestBrokenTokensAreToldApart(t *testing.T) {
	token, err := pki.NewToken(caOf(authority(t, "c1")))
	require.NoError(t, err)
	text := token.String()
	flip := func(i int) string {
		b := []byte(text)
		b[i] = 'A' + (b[i]-'A'+1)%26
		return string(b)
	}
	for input, want := range map[string]string{
		"":                          "no join token",
		"dps_abc":                   "no join token",
		"dpj2." + text[5:]:          `version "dpj2"`,
		text[:len(text)-7]:          fmt.Sprintf("was cut: it has %d of %d", len(text)-7, len(text)),
		text[:5]:                    "was cut",
		text + "AAAA":               "4 too many",
		flip(10):                    "was changed",
		flip(40):                    "was changed",
		text[:20] + "!" + text[21:]: "a character that no token has",
	} {
		_, err := pki.ParseToken(input)
		var p *problem.Error
		require.ErrorAs(t, err, &p, input)
		assert.Equal(t, problem.InvalidArgument, p.Code)
		assert.Contains(t, p.Message, want)
		assert.NotEmpty(t, p.Hint)
		if len(input) > 10 {
			assert.NotContains(t, p.Message, input[5:], "an error shows no token")
		}
	}
	_, err = pki.HashSecret("zz")
	assert.Equal(t, problem.Unauthenticated, problem.CodeOf(err))
}

func FuzzParseToken(f *testing.F) {
	token, err := pki.NewToken(caOf(authority(f, "c1")))
	require.NoError(f, err)
	f.Add(token.String())
	f.Add("dpj1.")
	f.Add("dpj9.abc")
	f.Fuzz(func(t *testing.T, s string) {
		got, err := pki.ParseToken(s)
		if err != nil {
			assert.Equal(t, problem.InvalidArgument, problem.CodeOf(err))
			return
		}
		again, err := pki.ParseToken(got.String())
		require.NoError(t, err)
		assert.Equal(t, got, again)
	})
}
