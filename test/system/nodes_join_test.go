package system

import (
	"crypto/tls"
	"encoding/json"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// CC16, HF73, SP10: who may not join is refused, with the reason and what to do, and so is a data dir of
// another cluster. The renewal of certificates and the gossip's encryption are tested in their packages.
func TestSP10JoinRefused(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, harness.Each(1))
	c.Expect(harness.NodeFails, harness.JoinRefused)
	foreign := harness.StartMembers(t, harness.Each(1))
	foreign.Expect(harness.NodeFails, harness.JoinRefused)
	a := c.All[0]
	used, expired := newToken(t, a, "ttl=1h&uses=1"), newToken(t, a, "ttl=1s&uses=9")
	forWorkers := newToken(t, a, "ttl=1h&uses=9&roles=worker,ingress")
	revoked := newToken(t, a, "ttl=1h&uses=9")
	wait := time.Now().Add(1100 * time.Millisecond)
	join := func(args ...string) *harness.Real {
		return harness.Run(t, append([]string{
			"join", a.NodePort(), "--advertise", c.NextIP(), "--roles", "worker",
			"--data-dir", filepath.Join(t.TempDir(), "data"), "--http-bind", "127.0.0.1:0", "--admin-bind",
			"127.0.0.1:0",
		}, args...)...)
	}
	// takes the cluster's own token; the next takes the one that is good for one node
	m := c.Add("b", "--roles", "worker")
	m.Kill()
	code, text, err := a.Ask(http.MethodDelete, "/api/v1/join-tokens/"+revoked.ID, "")
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, code, text)
	first := join("--token", used.Token, "--node-id", "x")
	c.Eventually("the token's one use", func() error {
		list, err := a.Nodes()
		if err == nil && len(list) < 3 {
			err = errNotYet
		}
		return err
	})
	first.Stop()
	time.Sleep(time.Until(wait))
	for name, try := range map[string]struct {
		args []string
		says string
		code int
	}{
		"no token": {nil, "--token", 2},
		"junk":     {[]string{"--token", "sesame"}, "token", 2},
		"used":     {[]string{"--token", used.Token, "--node-id", "y"}, "used", 0},
		"expired":  {[]string{"--token", expired.Token, "--node-id", "y"}, "expired", 0},
		"revoked":  {[]string{"--token", revoked.Token, "--node-id", "y"}, "was revoked: " + revoked.ID, 0},
		"more roles": {
			[]string{"--token", forWorkers.Token, "--node-id", "y", "--roles", "control"},
			forWorkers.ID + " is for worker, ingress, and the node asks for control", 0,
		},
		"another cluster's": {[]string{"--token", foreign.Token(), "--node-id", "y"}, "cluster", 0},
		"changed":           {[]string{"--token", changed(c.Token()), "--node-id", "y"}, "token", 0},
		"a taken name": {
			[]string{"--token", c.Token(), "--node-id", "a"},
			`"a" is held by another node`,
			0,
		},
	} {
		r := join(try.args...)
		code := r.ExitCode()
		assert.NotZero(t, code, "%s: %s", name, r.Output())
		if try.code != 0 {
			assert.Equal(t, try.code, code, "%s: %s", name, r.Output())
		}
		assert.Contains(t, r.Output(), try.says, name)
		assert.Contains(t, r.Output(), "hint:", name)
		t.Logf("%s: exit code %d: %s", name, code, r.Output())
	}
	foreign.All[0].Term()
	for name, args := range map[string][]string{
		"join": {
			"join", a.NodePort(), "--token", c.Token(), "--advertise", c.NextIP(), "--node-port",
			strconv.Itoa(c.NodePort()), "--gossip-port", "0", "--node-id", "a",
		},
		"start, as another node": {"start", "--node-id", "b"},
	} {
		r := harness.Run(t, append(args, "--data-dir", foreign.All[0].Dir, "--http-bind", "127.0.0.1:0",
			"--admin-bind", "127.0.0.1:0")...)
		assert.Equal(t, 1, r.ExitCode(), "%s: %s", name, r.Output())
		assert.Regexp(t, `belongs to (another cluster than the token|node a, not b)`, r.Output(), name)
		assert.Contains(t, r.Output(), "\nhint: ", name)
	}
	list, err := a.Nodes()
	require.NoError(t, err)
	assert.Len(t, list, 3, "nobody else is in")
	var shown struct{ Tokens []client.JoinToken }
	require.NoError(t, a.Get("/api/v1/join-tokens", &shown))
	status := map[string]string{}
	for _, k := range shown.Tokens {
		status[k.ID] = k.Status + " by " + k.By
	}
	assert.Equal(t, map[string]string{
		used.ID: "used up by a", expired.ID: "expired by a", revoked.ID: "revoked by a",
		forWorkers.ID: "valid by a", shown.Tokens[len(shown.Tokens)-1].ID: "valid by a at its first start",
	}, status)
	strangers(t, a.NodePort())
	c.WaitNode("a", "leads on", alive)
}

// changed is a token with another secret.
func changed(token string) string {
	last := byte('A')
	if token[len(token)-1] == last {
		last = 'Q'
	}
	return token[:len(token)-1] + string(last)
}

func newToken(t *testing.T, m *harness.Member, query string) (made client.Token) {
	t.Helper()
	code, text, err := m.Ask(http.MethodPost, "/api/v1/join-tokens?"+query, "")
	require.NoError(t, err)
	require.Less(t, code, http.StatusMultipleChoices, text)
	require.NoError(t, json.Unmarshal([]byte(text), &made))
	require.NotEmpty(t, made.Token, text)
	return made
}

// strangers speaks to the node port as a program that is not a member: each is refused before it is heard.
func strangers(t *testing.T, address string) {
	t.Helper()
	for name, config := range map[string]*tls.Config{
		"TLS 1.2":        {MaxVersion: tls.VersionTLS12, NextProtos: []string{"dpserve-grpc/1"}},
		"no certificate": {NextProtos: []string{"dpserve-grpc/1"}},
		"no protocol":    {},
	} {
		config.InsecureSkipVerify = true
		conn, err := tls.DialWithDialer(&net.Dialer{Timeout: harness.Patience}, "tcp", address, config)
		if err == nil { // with TLS 1.3 a client learns of its refusal when it reads
			require.NoError(t, conn.SetDeadline(time.Now().Add(harness.Patience)), name)
			_, err = conn.Read(make([]byte, 1))
			_ = conn.Close()
		}
		require.Error(t, err, name)
		t.Logf("%s: %v", name, err)
	}
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(harness.Patience)))
	_, _ = conn.Write([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
	n, err := conn.Read(make([]byte, 512))
	t.Logf("plain text: %d bytes, %v", n, err)
}
