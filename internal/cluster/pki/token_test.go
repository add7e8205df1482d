package pki_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
)

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
