package access

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// newPair returns the PEM texts of a certificate that expires after lasts, and of its key.
func newPair(t *testing.T, serial int64, lasts time.Duration) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	c := &x509.Certificate{SerialNumber: big.NewInt(serial), NotAfter: time.Now().Add(lasts)}
	der, err := x509.CreateCertificate(rand.Reader, c, c, k.Public(), k)
	require.NoError(t, err)
	secret, err := x509.MarshalPKCS8PrivateKey(k)
	require.NoError(t, err)
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
		string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}))
}

// The certificate changes with its files. While only one of the two has changed, the pair before it is used.
func TestCertificatesChange(t *testing.T) {
	g := newRig(t)
	const year = 365 * 24 * time.Hour
	cert1, key1 := newPair(t, 1, year)
	cert2, key2 := newPair(t, 2, year)
	files := Files{TLSCert: g.write("cert", cert1), TLSKey: g.write("key", key1)}
	a, err := g.open(files)
	require.NoError(t, err)
	serial := func() int64 {
		c, err := a.TLSConfig().GetCertificate(nil)
		require.NoError(t, err)
		return c.Leaf.SerialNumber.Int64()
	}
	look := func(times int) {
		for range times {
			a.look(time.Now())
		}
	}
	assert.EqualValues(t, 1, serial())
	assert.Equal(t, "https", a.Scheme())
	g.write("cert", cert2)
	look(4)
	assert.EqualValues(t, 1, serial(), "the key is still that of the first")
	assert.Equal(t, 1, g.warnings())
	g.write("key", key2)
	look(2)
	assert.EqualValues(t, 2, serial())
	g.write("cert", "")
	look(4)
	assert.EqualValues(t, 2, serial())
	assert.Equal(t, 2, g.warnings())
	assert.NotContains(t, g.logs.String(), "PRIVATE")

	files.TLSKey = g.write("other", key1)
	_, err = g.open(files)
	require.ErrorContains(t, err, "--tls-cert, --tls-key: ", "a node does not start so")
}

// A certificate that expires within two weeks is shown in the status of the node, and the log has one line
// then and one when it has expired.
func TestCertificatesExpire(t *testing.T) {
	g := newRig(t)
	const day = 24 * time.Hour
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	c := &certificate{expires: now.Add(30 * day)}
	expiry := expiryLog{log: g.log}
	for _, at := range []struct {
		days int
		text string
		logs int
	}{
		{0, "", 0},
		{15, "", 0},
		{17, "the certificate of --tls-cert expires at 2026-01-31T00:00:00Z; replace the files", 1},
		{29, "the certificate of --tls-cert expires at 2026-01-31T00:00:00Z; replace the files", 1},
		{31, "the certificate of --tls-cert has expired at 2026-01-31T00:00:00Z; replace the files", 2},
		{99, "the certificate of --tls-cert has expired at 2026-01-31T00:00:00Z; replace the files", 2},
	} {
		then := now.Add(time.Duration(at.days) * day)
		assert.Contains(t, c.warning(then), at.text)
		assert.Equal(t, at.text == "", c.warning(then) == "")
		expiry.look(c, then)
		assert.Equal(t, at.logs, g.warnings(), at.days)
	}
}
