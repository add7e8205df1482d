package pki

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"log/slog"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// A token is "dpj1." and the base64url of secret, fingerprint and checksum.
const (
	tokenFamily = "dpj"
	tokenPrefix = tokenFamily + "1."
	secretSize  = 16
	sumSize     = 4
	tokenSize   = secretSize + sha256.Size + sumSize
)

// Token lets a node join. The node shows the secret, and the fingerprint tells it that it talks to the right
// cluster.
type Token struct {
	Secret      [secretSize]byte
	Fingerprint [sha256.Size]byte // of the authority's certificate
}

// NewToken makes a token of the cluster with this authority.
func NewToken(authorityPEM []byte) (Token, error) {
	var t Token
	var err error
	if t.Fingerprint, err = Fingerprint(authorityPEM); err != nil {
		return Token{}, err
	}
	_, _ = rand.Read(t.Secret[:]) // never fails
	return t, nil
}

// ParseToken reads the result of String. The error never contains the token.
func ParseToken(s string) (Token, error) {
	s = strings.TrimSpace(s)
	if !strings.HasPrefix(s, tokenPrefix) {
		return Token{}, notATokenError(s)
	}
	data, err := base64.RawURLEncoding.Strict().DecodeString(s[len(tokenPrefix):])
	want := len(tokenPrefix) + base64.RawURLEncoding.EncodedLen(tokenSize)
	switch {
	case len(s) < want:
		return Token{}, damagedTokenError("the token was cut: it has %d of %d characters", len(s), want)
	case len(s) > want:
		return Token{}, damagedTokenError("the token has %d characters, %d too many", len(s), len(s)-want)
	case err != nil:
		return Token{}, damagedTokenError("the token has a character that no token has")
	}
	sum := sha256.Sum256(data[:tokenSize-sumSize])
	if !bytes.Equal(sum[:sumSize], data[tokenSize-sumSize:]) {
		return Token{}, damagedTokenError("the token was changed: its checksum does not fit")
	}
	var t Token
	copy(t.Secret[:], data)
	copy(t.Fingerprint[:], data[secretSize:])
	return t, nil
}

// String returns the token for people to copy. It is a secret.
func (t Token) String() string {
	data := make([]byte, 0, tokenSize)
	data = append(data, t.Secret[:]...)
	data = append(data, t.Fingerprint[:]...)
	sum := sha256.Sum256(data)
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(append(data, sum[:sumSize]...))
}

// LogValue hides the token in logs.
func (Token) LogValue() slog.Value { return slog.StringValue(tokenPrefix + "***") }

// SecretText returns the secret in hex, as nodes send it.
func (t Token) SecretText() string { return hex.EncodeToString(t.Secret[:]) }

// Hash returns the hex of the SHA-256 of the secret. The cluster stores only this hash.
func (t Token) Hash() string { return hashOf(t.Secret[:]) }

// HashSecret returns the hash of a secret that was sent as SecretText.
func HashSecret(text string) (string, error) {
	secret, err := hex.DecodeString(text)
	if err != nil || len(secret) != secretSize {
		return "", problem.New(problem.Unauthenticated, "this is no secret of a join token")
	}
	return hashOf(secret), nil
}

func hashOf(secret []byte) string {
	sum := sha256.Sum256(secret)
	return hex.EncodeToString(sum[:])
}

func notATokenError(s string) error {
	if version, _, ok := strings.Cut(s, "."); ok && strings.HasPrefix(version, tokenFamily) &&
		len(version) < 8 {
		return problem.New(problem.InvalidArgument, "the token has version %q, this dpserve knows %q",
			version, strings.TrimSuffix(tokenPrefix, ".")).
			WithHint("use the same dpserve on both machines")
	}
	return problem.New(problem.InvalidArgument, "this is no join token: one begins with %q", tokenPrefix).
		WithHint("copy the whole join command that `dpserve start` printed")
}

func damagedTokenError(format string, args ...any) error {
	return problem.New(problem.InvalidArgument, format, args...).WithHint("copy the whole join command again")
}
