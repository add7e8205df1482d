package access

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/problem"
)

// adminTokenName is the file of the data dir that holds the admin token.
const adminTokenName = "admin.token"

// Bounds of the token that --admin-token-file holds.
const (
	shortestAdminToken = 16
	longestAdminToken  = 512
)

// AdminToken is what callers of the admin API show. The zero token opens the admin API to all.
type AdminToken struct {
	Text string
	File string // holds Text; "" = no file does
}

// OpenAdminToken reads the token of file. Without a file it reads that of the data dir, which must be this
// process's by then, and makes it at the first start. Without a data dir the token lives as long as the
// process.
func OpenAdminToken(file, dataDir string) (AdminToken, error) {
	switch {
	case file != "":
		text, err := readAdminToken(file)
		return AdminToken{text, file}, err
	case dataDir == "":
		return AdminToken{Text: newAdminToken()}, nil
	}
	file, err := filepath.Abs(filepath.Join(dataDir, adminTokenName))
	if err != nil {
		return AdminToken{}, err
	}
	text, err := keepAdminToken(file)
	return AdminToken{text, file}, err
}

// keepAdminToken returns the token of a data dir, and makes it at the first start.
func keepAdminToken(path string) (string, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		token := newAdminToken()
		return token, diskfile.Replace(path, []byte(token+"\n"))
	}
	if err == nil && info.Mode().Perm()&0o077 != 0 {
		return "", problem.New(problem.InvalidArgument, "%s can be read by others", path).
			WithHint("delete it, and the node makes another token; or `chmod 600` it, if nobody has read it")
	}
	return readAdminToken(path)
}

func readAdminToken(path string) (string, error) {
	text, err := os.ReadFile(path)
	token := strings.TrimSpace(string(text))
	switch {
	case err != nil:
		return "", problem.New(problem.InvalidArgument, "the admin token cannot be read: %w", err).
			WithHint("name a file with --admin-token-file that this user may read")
	case len(token) < shortestAdminToken || len(token) > longestAdminToken ||
		strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }):
		return "", problem.New(problem.InvalidArgument, "%s holds no admin token: want one line of %d to %d "+
			"printable characters", path, shortestAdminToken, longestAdminToken).
			WithHint("make one with `openssl rand -hex 32`")
	}
	return token, nil
}

// newAdminToken draws a token.
func newAdminToken() string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails since Go 1.24
	return "dpa1." + hex.EncodeToString(b[:])
}
